"""Settings from the command line."""

from __future__ import annotations

import pytest

from torchrec_flowtt.config import ConfigError, parse_config

RULES = "tables: [{name: 'cross_*', kernel: flowtt, tt_ranks: 8}, {name: '*'}]"


def test_values_are_yaml_and_later_ones_win():
    config = parse_config(
        RULES,
        [
            "train.epochs=3",
            "train.epochs=4",
            "model.dense_layers=[32, 16]",
            "data.path=null",
            "optimizer.sparse={name: adam, learning_rate: 0.5}",
            "tables.0.tt_ranks=[4, 2]",
            "tables.*.sharding=row_wise",
        ],
    )
    assert config.train.epochs == 4
    assert config.model.dense_layers == (32, 16)
    assert config.data.path is None
    assert config.optimizer.sparse.name == "adam"
    assert config.tables[0].tt_ranks == (4, 2)
    assert config.tables[1].sharding == "row_wise"


def test_an_entry_of_tables_is_found_by_its_name():
    config = parse_config(RULES, ["tables.cross_*.kernel=fbgemm"])
    assert config.tables[0].kernel == "fbgemm"


def test_a_whole_list_can_be_replaced():
    assert parse_config(RULES, ["tables=[]"]).tables == ()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.epochs", "expected key.path=value"),
        ("=3", "expected key.path=value"),
        ("train..epochs=3", "expected key.path=value"),
        ("train.epochs=[1", "'[1' is not a YAML value"),
        ("train.epoch=1", "unknown key train.epoch; did you mean train.epochs?"),
        ("tables.cross.kernel=fbgemm", "tables has no entry 'cross'; it has 2 entries named"),
        ("tables.7.kernel=fbgemm", "tables has no entry '7'"),
        ("tables.0.name.x=1", "tables.0.name is 'cross_*' and has no keys"),
        ("tables.0.kernl=fbgemm", "did you mean tables.cross_*.kernel?"),
    ],
)
def test_mistakes(override, expected):
    with pytest.raises(ConfigError) as caught:
        parse_config(RULES, [override])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_entry_of_a_default_list_can_be_set():
    assert parse_config("", ["model.dense_layers.0=32"]).model.dense_layers == (32, 16)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.epoch=4"], "override 'train.epoch=4': unknown key train.epoch; did you mean"),
        (["seed=3", "epochs=4"], "override 'epochs=4': unknown key epochs; did you mean train.ep"),
        (["tables.cross_*.tt_ranks=0", "seed=3"], "override 'tables.cross_*.tt_ranks=0': tables."),
        # The error is the section's, the cause one of its keys.
        (["seed=3", "model.embedding_dim=8"], "override 'model.embedding_dim=8': model: dense_lay"),
        (["model.dense_layers.0=x"], "override 'model.dense_layers.0=x': model.dense_layers.0: m"),
        (["tables={}"], "override 'tables={}': tables: must be a list"),
    ],
)
def test_an_override_s_mistake_names_the_override(overrides, expected):
    with pytest.raises(ConfigError) as caught:
        parse_config(RULES, overrides, source="c.yaml")
    assert expected in str(caught.value)


def test_the_file_s_own_mistake_is_not_blamed_on_an_override():
    with pytest.raises(ConfigError, match="^c.yaml: unknown key sede"):
        parse_config("sede: 1", ["seed=2"], source="c.yaml")
