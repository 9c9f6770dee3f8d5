"""Which rule holds for which table."""

from __future__ import annotations

import pytest

from torchrec_flowtt.config import ConfigError, TableRule, select_rules

TABLES = ["user", "item", "cross_a", "cross_b"]


def rule(name: str, rank: int) -> TableRule:
    return TableRule(name=name, kernel="flowtt", tt_ranks=rank)


def test_first_match_wins_and_the_rest_is_fbgemm():
    chosen = select_rules([rule("cross_a", 2), rule("cross_*", 3)], TABLES)
    assert list(chosen) == TABLES
    assert [chosen[name].tt_ranks for name in TABLES] == [None, None, 2, 3]
    assert chosen["user"].kernel == "fbgemm"


def test_globs_are_case_sensitive():
    with pytest.raises(ConfigError, match="no table matches 'USER'"):
        select_rules([rule("USER", 2)], TABLES)


def test_a_rule_without_a_table_lists_the_tables_and_the_nearest():
    with pytest.raises(ConfigError) as caught:
        select_rules([rule("crossa", 2)], TABLES)
    assert "did you mean cross_a?" in str(caught.value)
    assert "the tables are user, item, cross_a, cross_b" in str(caught.value)


def test_a_rule_that_comes_too_late_is_an_error():
    with pytest.raises(ConfigError, match="put the more specific entry first"):
        select_rules([rule("cross_*", 2), rule("cross_a", 3)], TABLES)


def test_a_final_catch_all_may_have_nothing_left():
    assert len(select_rules([rule("*", 2), TableRule(name="*")], TABLES)) == 4
