"""Which rule of ``tables`` holds for which table of the model."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence

from torchrec_flowtt.config.errors import ConfigError
from torchrec_flowtt.config.schema import TableRule


def select_rules(rules: Sequence[TableRule], table_names: Sequence[str]) -> dict[str, TableRule]:
    """Returns the rule of every table: the first whose name or glob matches, else plain fbgemm.

    Raises:
        ConfigError: a rule matches no table at all, or only tables that earlier rules have taken.

    >>> rules = [TableRule(name="cross_*", kernel="flowtt", tt_ranks=8)]
    >>> chosen = select_rules(rules, ["user", "cross_age_item"])
    >>> [(name, rule.kernel) for name, rule in chosen.items()]
    [('user', 'fbgemm'), ('cross_age_item', 'flowtt')]
    """
    chosen: dict[str, TableRule] = {}
    for position, rule in enumerate(rules):
        matched = [name for name in table_names if fnmatch.fnmatchcase(name, rule.name)]
        if not matched:
            near = difflib.get_close_matches(rule.name, table_names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"tables.{position}: no table matches {rule.name!r}{hint}"
                f" (the tables are {', '.join(table_names)})"
            )
        free = [name for name in matched if name not in chosen]
        if not free and rule.name != "*":
            raise ConfigError(
                f"tables.{position}: earlier entries already match every table of {rule.name!r}"
                f" ({', '.join(matched)}); put the more specific entry first"
            )
        chosen.update((name, rule) for name in free)
    return {name: chosen.get(name, TableRule(name=name)) for name in table_names}
