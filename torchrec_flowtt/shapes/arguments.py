"""Checks of the integer arguments that describe a table."""

from __future__ import annotations

import operator
from collections.abc import Sequence

__all__ = ["checked_integer", "positive_integer", "positive_integers", "table_label"]


def table_label(name: str) -> str:
    """How error messages call the table: with its name where it has one.

    >>> table_label("ads"), table_label("")
    ("TT table 'ads'", 'TT table')
    """
    return f"TT table {name!r}" if name else "TT table"


def checked_integer(value: object, argument: str) -> int:
    """`value` as an int; integer-like objects (NumPy's integers) are taken, bool and float are not.

    Raises:
        TypeError: `value` is no integer; the message calls it `argument`.

    >>> checked_integer(8, "num_embeddings")
    8
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        kind = type(value).__name__
        raise TypeError(f"{argument} must be an integer, got {value!r} ({kind})")
    return operator.index(value)


def positive_integer(value: object, argument: str, table: str) -> int:
    """Returns `value` as a positive int; see :func:`checked_integer`.

    Args:
        value: what the user gave.
        argument: name of the argument, for the message.
        table: label of the table, see :func:`table_label`.

    Raises:
        TypeError: `value` is no integer.
        ValueError: `value` is not positive.
    """
    number = int(checked_integer(value, f"{table}: {argument}"))  # of an enum, its value
    if number <= 0:
        raise ValueError(f"{table}: {argument} must be positive, got {number}")
    return number


def positive_integers(values: object, argument: str, table: str) -> tuple[int, ...]:
    """Returns the sequence `values` as a tuple of positive ints; see :func:`positive_integer`.

    Raises:
        TypeError: `values` is no sequence, or an element is no integer.
        ValueError: an element is not positive.
    """
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        kind = type(values).__name__
        raise TypeError(
            f"{table}: {argument} must be a sequence of integers, got {values!r} ({kind})"
        )
    return tuple(
        positive_integer(value, f"{argument}[{position}]", table)
        for position, value in enumerate(values)
    )
