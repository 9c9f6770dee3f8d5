"""YAML to typed configuration, and the one line a mistake gets."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pydantic
import pytest

from torchrec_flowtt.config import ConfigError, JobConfig, load_config, parse_config

MOVIELENS = pathlib.Path(__file__).parents[2] / "configs" / "movielens.yaml"


def message(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, overrides, source="c.yaml")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_empty_document_is_the_defaults():
    assert parse_config("") == JobConfig()


def test_shipped_configuration_loads_and_compresses_the_crosses():
    config = load_config(MOVIELENS)
    assert [(rule.name, rule.kernel) for rule in config.tables] == [
        ("cross_*", "flowtt"),
        ("*", "fbgemm"),
    ]
    assert config.data.cross_rows == 2**20


def test_configuration_is_frozen():
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        JobConfig().train.epochs = 7


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {epoch: 2}", "c.yaml: unknown key train.epoch; did you mean train.epochs?"),
        ("modle: {}", "c.yaml: unknown key modle; did you mean model?"),
        (
            "optimizer: {sparse: {learning_rat: 1}}",
            "unknown key optimizer.sparse.learning_rat; did you mean"
            " optimizer.sparse.learning_rate?",
        ),
        (
            "tables: [{name: user, kernl: flowtt}]",
            "unknown key tables.user.kernl; did you mean tables.user.kernel?",
        ),
        # The unknown key is the cause, so it is named before the value that is missing.
        ("tables: [{nam: user}]", "unknown key tables.0.nam; did you mean tables.0.name?"),
        (
            "optimizer.dense: 3",
            "in YAML it is nested: optimizer: {dense: ...}",
        ),
        ("epochs: 3", "unknown key epochs; did you mean train.epochs?"),
        ("train: {seeed: 3}", "unknown key train.seeed; did you mean seed?"),
        ("learning_rate: 3", "mean optimizer.sparse.learning_rate or optimizer.dense.learning"),
        ("train: {epochs: five}", "train.epochs: must be a whole number, not 'five'"),
        ("train: {epochs: 0}", "train.epochs: must be greater than 0, not 0"),
        ("optimizer: {sparse: {learning_rate: .nan}}", "must be a finite number"),
        ("tables: [{kernel: flowtt}]", "tables.0.name: this key is needed"),
        ("model: {embedding_dim: 8}", "model: dense_layers must end in embedding_dim = 8, not 16"),
        ("model: {over_layers: [8, 2]}", "model: over_layers must end in 1, not 2"),
        ("model: {embedding_dim: 6, dense_layers: [6]}", "multiple of 4"),
        ("model: {dense_layers: [100000, 16]}", "dense_layers.0: must be at most 16384, not 100"),
        (
            "model: {dense_layers: 16}",
            "dense_layers: must be a list of whole numbers, not 16",
        ),
        ("model: {over_layers: [1]}", "must be a list of at least 2 whole numbers, not [1]"),
        ("train: 3", "train: must be a mapping with keys epochs, batch_size, log_every, not 3"),
        ("tables: {name: user}", "tables: must be a list of mappings"),
        ("tables: [user]", "tables.0: must be a mapping with keys name, kernel, tt_ranks"),
        ("tables: [{name: u, tt_ranks: x}]", "tables.u.tt_ranks: must be a whole number or a list"),
        ("device: tpu", "device: must be one of 'auto', 'cpu' or 'cuda', not 'tpu'"),
        ("run_folder: ''", "run_folder: must not be empty"),
        ("checkpoint: {folder: ''}", "checkpoint.folder: must not be empty"),
        ("optimizer: {sparse: {weight_decay: 0.1}}", "for adam only, row_wise_adagrad has none"),
        ("data: {validation_fraction: 0.6, test_fraction: 0.4}", "must be less than 1"),
        ("train: {epochs: 1}\ntrain: {epochs: 2}", "c.yaml, line 2: key 'train' is there twice"),
        ("tables: [", "c.yaml, line 1"),
        ("- 1", "c.yaml: expected keys and values, found list"),
    ],
)
def test_mistakes_name_the_key_and_the_remedy(text, expected):
    assert expected in message(text)


@pytest.mark.parametrize("value", ["true", "'3'", "[3]", "3 apples"])
@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("seed", "whole number"),
        ("train.epochs", "whole number"),
        ("checkpoint.every_steps", "whole number"),
        ("data.positive_rating", "number"),
        ("data.test_fraction", "number"),
        ("optimizer.sparse.weight_decay", "number"),
    ],
)
def test_only_numbers_are_numbers(key, value, expected):
    text = message("", f"{key}={value}")
    assert f"{key}: must be a {expected}, not " in text


def test_nothing_is_suggested_when_nothing_is_near():
    assert message("zzz: 1") == "c.yaml: unknown key zzz"


@pytest.mark.parametrize("name", ["sgd", "adagrad", "row_wise_adagrad", "adam"])
def test_weight_decay_is_adam_s(name):
    setting = f"optimizer.sparse={{name: {name}, weight_decay: 0.1}}"
    if name == "adam":
        assert parse_config("", [setting]).optimizer.sparse.weight_decay == 0.1
    else:
        assert f"weight_decay 0.1 is for adam only, {name} has none" in message("", setting)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("", "tables.t: kernel flowtt needs tt_ranks or max_bytes"),
        ("tt_ranks: 4, max_bytes: 1000", "only one of them"),
        ("tt_ranks: [4, 4, 4], num_cores: 3", "tt_ranks has 3 numbers, 3 cores need 2"),
        ("tt_ranks: [4], p_shapes: [2, 3, 4]", "tt_ranks has 1 numbers, 3 cores need 2"),
        ("tt_ranks: 4, p_shapes: [2, 3], num_cores: 3", "p_shapes has 2 factors, num_cores is 3"),
        ("tt_ranks: 4, q_shapes: [4]", "1 cores follow from its lists; 2 to 4 are possible"),
        ("tt_ranks: 4, q_shapes: [2, 2, 2]", "q_shapes: [2, 2, 2] multiply to 8"),
        ("tt_ranks: 0", "tables.t.tt_ranks: must be greater than 0"),
        ("tt_ranks: [4, -1]", "tables.t.tt_ranks"),
        ("tt_ranks: 2000000000", "tables.t.tt_ranks: must be at most 65536"),
        ("tt_ranks: 4, sharding: row_wise", "row_wise does not exist for kernel flowtt"),
        ("tt_ranks: 4, num_cores: 5", "tables.t.num_cores: must be at most 4"),
    ],
)
def test_impossible_tt_fields_are_refused(fields, expected):
    separator = ", " if fields else ""
    text = "tables: [{name: t, kernel: flowtt" + separator + fields + "}]"
    assert expected in message(text)


@pytest.mark.parametrize(
    ("fields", "cores", "ranks"),
    [
        ("tt_ranks: 4", 3, (4, 4)),
        ("tt_ranks: 4, num_cores: 2", 2, (4,)),
        ("tt_ranks: [4, 5, 6]", 4, (4, 5, 6)),
        ("tt_ranks: 4, p_shapes: [2, 3]", 2, (4,)),
        ("max_bytes: 4096, q_shapes: [4, 4]", 2, None),
    ],
)
def test_number_of_cores_follows_from_what_is_given(fields, cores, ranks):
    rule = parse_config("tables: [{name: t, kernel: flowtt, " + fields + "}]").tables[0]
    assert (rule.resolved_num_cores, rule.resolved_tt_ranks) == (cores, ranks)


def test_tt_fields_of_an_fbgemm_rule_are_ignored():
    rule = parse_config("tables: [{name: t, tt_ranks: [1, 2, 3], num_cores: 2}]").tables[0]
    assert rule.kernel == "fbgemm"


def test_exponents_without_a_dot_are_numbers():
    # YAML 1.1 reads 1e-3 as text.
    config = parse_config("optimizer: {dense: {learning_rate: 1e-3}}")
    assert config.optimizer.dense.learning_rate == 0.001


def test_unreadable_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.yaml: cannot be read: No such file"):
        load_config(tmp_path / "nowhere.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="binary.yaml: is not UTF-8"):
        load_config(binary)


def test_yaml_that_would_run_code_is_refused():
    assert "could not determine a constructor" in message("a: !!python/object/apply:os.getcwd []")


def test_configuration_modules_do_not_import_torch_themselves():
    code = (
        "import sys, types; package = types.ModuleType('torchrec_flowtt');"
        f"package.__path__ = [{str(MOVIELENS.parents[1] / 'torchrec_flowtt')!r}];"
        "sys.modules['torchrec_flowtt'] = package; import torchrec_flowtt.config;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
