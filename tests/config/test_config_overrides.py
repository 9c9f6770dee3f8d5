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
