"""Batches with one fault each, and what the error has to say about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.sharded_models import Table

TABLES = [
    Table("tt_a", "tw0", ["a", "shared"], rows=60),
    Table("tt_b", "tw0", ["b"], rows=50, dim=12, ranks=(4,)),
    Table("tt_dp", "dp", ["c", "shared"], rows=60),
    Table("fb", "tw0", ["d"], tt=False, rows=50),
]
KEYS = ["a", "shared", "b", "c", "d"]
ALL = (*KEYS, *(table.name for table in TABLES))
LENGTHS = [2, 1, 0, 3, 1, 1, 2, 0, 1, 1]
COUNT = sum(LENGTHS)


def batch(weighted: bool = False, **changes: Any) -> KeyedJaggedTensor:
    """Two bags of each feature, with other arguments where `changes` has them."""
    arguments = {
        "keys": KEYS,
        "values": torch.arange(COUNT),
        "weights": torch.full((COUNT,), 0.5) if weighted else None,
        **changes,
    }
    if "offsets" not in arguments:
        arguments.setdefault("lengths", torch.tensor(LENGTHS))
    return KeyedJaggedTensor(**arguments)


def batch_with_value(position: int, value: int) -> KeyedJaggedTensor:
    """A batch with one id changed."""
    values = torch.arange(COUNT)
    values[position] = value
    return batch(values=values)


@dataclass
class Fault:
    """A bad batch, the type of the error, and what its message names."""

    make: Callable[[], object]
    error: type[Exception]
    parts: tuple[str, ...]
    weighted: bool = False


def _lengths(feature: int, bag: int, value: int) -> torch.Tensor:
    lengths = torch.tensor(LENGTHS)
    lengths[2 * feature + bag] = value
    return lengths


def _offsets(**changes: int) -> torch.Tensor:
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    for position, value in changes.items():
        offsets[int(position[1:])] = value
    return offsets


# What is an error before a tensor is read, in every batch.
NAMES_AND_TYPES = {
    "a feature is missing": Fault(
        lambda: batch(keys=["a", "shared", "x", "c", "d"]), KeyError, ("'b'", "'tt_b'", "'x'")
    ),
    "an uncompressed table's feature is missing": Fault(
        lambda: batch(keys=["a", "shared", "b", "c", "x"]), KeyError, ("'d'", "'fb'", "'x'")
    ),
    "a shared feature is missing": Fault(
        lambda: batch(keys=["a", "x", "b", "c", "d"]), KeyError, ("'shared'", "'tt_a'", "'tt_dp'")
    ),
    "two features are missing": Fault(
        lambda: batch(keys=["a", "shared", "x", "y", "d"]),
        KeyError,
        ("'b'", "'tt_b'", "'c'", "'tt_dp'"),
    ),
    "a feature occurs twice": Fault(
        lambda: batch(
            keys=["a", "shared", "b", "c", "d", "b"], lengths=torch.tensor([*LENGTHS, 0, 0])
        ),
        ValueError,
        ("feature 'b'", "'tt_b'", "must differ"),
    ),
    "a key of no table occurs twice": Fault(
        lambda: batch(keys=[*KEYS, "x", "x"], lengths=torch.tensor([*LENGTHS, 0, 0, 0, 0])),
        ValueError,
        ("feature 'x'", "must differ"),
    ),
    "values of no integer type": Fault(
        lambda: batch(values=torch.arange(COUNT).float()), TypeError, (*ALL, "got torch.float32")
    ),
    "values of a narrow type": Fault(
        lambda: batch(values=torch.arange(COUNT).short()), TypeError, (*ALL, "got torch.int16")
    ),
    "values in two dimensions": Fault(
        lambda: batch(values=torch.arange(COUNT).reshape(4, 3)), ValueError, (*ALL, "(4, 3)")
    ),
    "weights are missing": Fault(batch, ValueError, (*ALL, "is_weighted=True"), weighted=True),
    "weights are integers": Fault(
        lambda: batch(weights=torch.ones(COUNT, dtype=torch.int64)),
        TypeError,
        (*ALL, "floating-point", "int64"),
        weighted=True,
    ),
    "weights are too few": Fault(
        lambda: batch(weights=torch.ones(COUNT - 1)),
        ValueError,
        (*ALL, f"{COUNT}, got {COUNT - 1}"),
        weighted=True,
    ),
    "weights are too many": Fault(
        lambda: batch(weights=torch.ones(COUNT + 1)),
        ValueError,
        (*ALL, f"{COUNT}, got {COUNT + 1}"),
        weighted=True,
    ),
    "a tensor": Fault(lambda: torch.arange(COUNT), TypeError, (*ALL, "KeyedJaggedTensor, got Ten")),
    "None": Fault(lambda: None, TypeError, (*ALL, "KeyedJaggedTensor, got NoneType")),
}

# What is an error in every batch on the CPU; elsewhere only what the sums of lengths tell.
LENGTHS_AND_OFFSETS = {
    "lengths beyond the values": Fault(
        lambda: batch(lengths=_lengths(3, 0, 4)), ValueError, (*ALL, f"{COUNT}, got ", "'c' 4")
    ),
    "lengths short of the values": Fault(
        lambda: batch(lengths=_lengths(3, 0, 1)), ValueError, (*ALL, f"{COUNT}, got ", "'c' 1")
    ),
    "an odd number of lengths": Fault(
        lambda: batch(lengths=torch.tensor([*LENGTHS[:-2], 2])), ValueError, (*ALL, "got 9")
    ),
    "the first offset": Fault(
        lambda: batch(offsets=_offsets(_0=1)), ValueError, ("'a'", "'tt_a'", "offsets[0]", "got 1")
    ),
    "the last offset": Fault(
        lambda: batch(offsets=_offsets(_10=20)), ValueError, (*ALL, f"{COUNT}, got 20")
    ),
    "a negative length": Fault(
        lambda: batch(lengths=torch.tensor([2, 1, 0, 3, -1, 3, 2, 0, 1, 1])),
        ValueError,
        ("'b'", "'tt_b'", "bag 0", "got -1"),
    ),
    "falling offsets": Fault(
        lambda: batch(offsets=_offsets(_3=6, _4=5)), ValueError, ("'shared'", "'tt_dp'", "got -1")
    ),
    "no bags, but values": Fault(
        lambda: batch(lengths=torch.tensor([], dtype=torch.int64)), ValueError, (*ALL, "got 0")
    ),
    "no offsets, but values": Fault(
        lambda: batch(offsets=torch.tensor([0])), ValueError, (*ALL, "got 0")
    ),
}

# Position of an id of each feature among the values, its table, and the table's rows.
IDS_OF_TT_TABLES = [
    (1, "a", "tt_a", 60),
    (4, "shared", "tt_a", 60),
    (6, "b", "tt_b", 50),
    (8, "c", "tt_dp", 60),
]


def assert_says(error: Exception, parts: tuple[str, ...]) -> None:
    """The message has all parts."""
    for part in parts:
        assert part in str(error), (part, str(error))
