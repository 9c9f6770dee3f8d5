"""Errors of lookups, with the names of what the operators know by number only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from torchrec_flowtt.shapes.arguments import quoted_names, table_label

__all__ = ["NAMED_ERRORS", "named_in_batch", "named_table"]

# What the functions raise about arguments; classes that are built from a message.
NAMED_ERRORS = (IndexError, TypeError, ValueError)

_Error = TypeVar("_Error", bound=Exception)
_NUMBERED = re.compile(r"\b(feature|table) (\d+)")


def named_table(error: _Error, table: str) -> _Error:
    """`error` of a lookup in one table, with its name where it has one.

    >>> named_table(IndexError("indices[3] of feature 0: expected 0 to 9, got 10"), "ads")
    IndexError("TT table 'ads': indices[3]: expected 0 to 9, got 10")
    """
    if not table:
        return error
    # Numbers of one table and one feature would only puzzle, next to the name.
    message = re.sub(r" of feature 0\b|\bfeature 0, ", "", str(error))
    message = message.replace("(table 0 has ", "(it has ")
    return type(error)(f"{table_label(table)}: {message}")


def named_in_batch(
    error: _Error,
    features: Sequence[str],
    tables: Sequence[str],
    feature_table_map: Sequence[int],
) -> _Error:
    """`error` of a batched lookup, with names for the features and tables it numbers.

    Args:
        error: what was raised.
        features: name of each feature, or nothing; ``""`` where it has none.
        tables: name of each table; ``""`` where it has none.
        feature_table_map: table of each feature.

    >>> error = ValueError("offsets[1]: expected 0 to 3, got 7 (feature 1, bag 0)")
    >>> named_in_batch(error, ["ad", "ad_seen"], ["ads"], [0, 0])
    ValueError("offsets[1]: expected 0 to 3, got 7 (feature 1, bag 0); feature 1 is 'ad_seen', ...")
    """
    names = {"feature": features, "table": tables}
    numbered = [(kind, int(number)) for kind, number in _NUMBERED.findall(str(error))]
    numbered += [("table", feature_table_map[n]) for kind, n in numbered if kind == "feature"]
    said = [
        f"{kind} {number} is {names[kind][number]!r}"
        for kind, number in dict.fromkeys(numbered)
        if number < len(names[kind]) and names[kind][number]
    ]
    if not numbered:  # it is about all of them
        said = [f"{kind}s {quoted_names(names[kind])}" for kind in names if any(names[kind])]
    return type(error)("; ".join([str(error), ", ".join(said)])) if said else error
