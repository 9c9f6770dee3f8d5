"""Cores in TT-Rec's layout against the lookup that its documentation gives, written out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.reference import dense_table
from torchrec_flowtt.decomposition import cores_from_tt_rec

P, Q, RANKS = (3, 4, 5, 2), (2, 3, 2, 1), (1, 4, 3, 2)


def theirs(d: int, tables: int):
    generator = torch.Generator().manual_seed(d)
    ranks = (*RANKS[:d], 1)
    return [
        torch.randn(tables, P[k], ranks[k] * Q[k] * ranks[k + 1], generator=generator).double()
        for k in range(d)
    ]


def looked_up(cores, table: int, row: int) -> list[float]:
    """One row, entry by entry: a sum over all bonds of products of one element a core."""
    d = len(cores)
    ranks = (*RANKS[:d], 1)
    strides = [math.prod(P[k + 1 : d]) for k in range(d)]
    digits = [row // stride % P[k] for k, stride in enumerate(strides)]
    entries = []
    for columns in itertools.product(*(range(q) for q in Q[:d])):
        total = 0.0
        for bonds in itertools.product(*(range(r) for r in ranks[1:d])):
            path = (0, *bonds, 0)
            product = 1.0
            for k in range(d):
                flat = (path[k] * Q[k] + columns[k]) * ranks[k + 1] + path[k + 1]
                product *= cores[k][table, digits[k], flat].item()
            total += product
        entries.append(total)
    return entries


@pytest.mark.parametrize("d", [2, 3, 4])
def test_rows_are_those_of_tt_rec(d):
    cores = theirs(d, tables=2)
    for table in (0, 1):
        ours = cores_from_tt_rec(cores, RANKS[1:d], table=table, num_embeddings=math.prod(P[:d]))
        dense = dense_table(ours)
        for row in range(0, dense.shape[0], 7):
            expected = torch.tensor(looked_up(cores, table, row), dtype=torch.float64)
            torch.testing.assert_close(dense[row], expected, rtol=1e-12, atol=1e-12)
        assert all(core.is_contiguous() for core in ours)
        assert ours[0].data_ptr() != cores[0].data_ptr()


def test_the_first_version_had_one_table():
    cores = theirs(3, tables=1)
    flat = [core[0] for core in cores]
    for ours, expected in zip(
        cores_from_tt_rec(flat, (4, 3)), cores_from_tt_rec(cores, (4, 3)), strict=True
    ):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("ranks", "arguments", "message"),
    [
        ((4,), {}, "tt_ranks must have 2 inner ranks for 3 cores, got 1"),
        ((5, 3), {}, r"cores\[0\] must have a multiple of 1 \* 5 elements a slice"),
        ((4, 3), {"table": 2}, "table must be 0 to 1, .* got 2"),
        ((4, 3), {"num_embeddings": 61}, "num_embeddings must be 1 to 60"),
    ],
)
def test_wrong_arguments(ranks, arguments, message):
    with pytest.raises(ValueError, match=message):
        cores_from_tt_rec(theirs(3, tables=2), ranks, **arguments)
