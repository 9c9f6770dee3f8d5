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
        ("optimizer.dense: 3", "unknown key optimizer.dense; did you mean optimizer?"),
        ("train: {epochs: five}", "train.epochs: input should be a valid integer"),
        ("train: {epochs: 0}", "train.epochs: input should be greater than 0, not 0"),
        ("optimizer: {sparse: {learning_rate: .nan}}", "should be a finite number"),
        ("tables: [{kernel: flowtt}]", "tables.0.name: this key is needed"),
        ("model: {embedding_dim: 8}", "model: dense_layers must end in embedding_dim = 8, not 16"),
        ("model: {over_layers: [8, 2]}", "model: over_layers must end in 1, not 2"),
        ("model: {embedding_dim: 6, dense_layers: [6]}", "multiple of 4"),
        ("data: {validation_fraction: 0.6, test_fraction: 0.4}", "must be less than 1"),
        ("train: {epochs: 1}\ntrain: {epochs: 2}", "c.yaml, line 2: key 'train' is there twice"),
        ("tables: [", "c.yaml, line 1"),
        ("- 1", "c.yaml: expected keys and values, found list"),
    ],
)
def test_mistakes_name_the_key_and_the_remedy(text, expected):
    assert expected in message(text)


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
        ("tt_ranks: 0", "tables.t.tt_ranks: input should be"),
        ("tt_ranks: [4, -1]", "tables.t.tt_ranks"),
        ("tt_ranks: 4, sharding: row_wise", "row_wise does not exist for kernel flowtt"),
        ("tt_ranks: 4, num_cores: 5", "tables.t.num_cores: input should be less than or equal"),
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
