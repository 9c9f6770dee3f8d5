"""Hypothesis strategies: tables of any shape, and calls that mix them."""

from __future__ import annotations

import dataclasses

import torch
from hypothesis import strategies as st

from tests.ops.random_calls import Call, Table, random_call
from tests.reference import NONE

CORE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)

# Primes, powers of two and sizes around the vector widths (4, 8, 16).
_P = st.sampled_from((1, 2, 3, 5, 7, 13))
_Q = st.sampled_from((1, 2, 3, 4, 5, 8, 16, 17))
_SMALL_Q = st.sampled_from((1, 2, 3, 4))
_RANK = st.sampled_from((1, 2, 3, 4, 7, 8, 16, 17, 33))


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """2 to 4 cores, any ranks, sometimes fewer rows than the factors allow."""
    d = draw(st.sampled_from((2, 3, 3, 4)))
    p = tuple(draw(_P) for _ in range(d))
    q = tuple(draw(_Q if d == 2 else _SMALL_Q) for _ in range(d))
    ranks = tuple(draw(_RANK) for _ in range(d - 1))
    table = Table(p, q, ranks)
    rows = draw(st.integers(1, table.rows))
    return Table(p, q, ranks, rows)


def _draw_call(
    draw: st.DrawFn,
    some_tables: list[Table],
    dtypes: tuple[torch.dtype, ...],
    *,
    pooling_mode: int,
    weighted: bool = False,
) -> Call:
    """Features of these tables, some of them shared, with all index types."""
    return random_call(
        some_tables,
        features=draw(st.lists(st.integers(0, len(some_tables) - 1), min_size=1, max_size=4)),
        batch_size=draw(st.sampled_from((0, 1, 3, 40))),
        longest_bag=draw(st.sampled_from((0, 1, 4, 30))),
        dtype=draw(st.sampled_from(dtypes)),
        index_dtype=draw(st.sampled_from(INDEX_DTYPES)),
        offset_dtype=draw(st.sampled_from(INDEX_DTYPES)),
        weighted=weighted,
        pooling_mode=pooling_mode,
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def calls(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = CORE_DTYPES) -> Call:
    """Several tables, features that share them, all index types, weights or none."""
    return _draw_call(
        draw,
        draw(st.lists(tables(), min_size=1, max_size=3)),
        dtypes,
        weighted=draw(st.booleans()),
        pooling_mode=draw(st.sampled_from((0, 1))),
    )


@st.composite
def row_calls(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = CORE_DTYPES) -> Call:
    """Calls without pooling: tables of one D, features that share them."""
    first = draw(tables())
    others = draw(st.lists(tables(), max_size=2))
    same_dim = [
        dataclasses.replace(first, p=other.p, num_embeddings=None)
        for other in others
        if len(other.p) == len(first.p)
    ]
    return _draw_call(draw, [first, *same_dim], dtypes, pooling_mode=NONE)


def output_dtypes(core_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The output dtypes that go with a core dtype."""
    if core_dtype == torch.float64:
        return (torch.float64,)
    return (torch.float32, torch.float16, torch.bfloat16)
