"""Hypothesis strategies: tables of any shape, and calls that mix them."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from tests.gpu.calls import Call, Table, make_call

CORE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Any shape; ranks and column factors that have a tiling, or are wide, are drawn often."""
    num_cores = draw(st.integers(2, 4))
    size = st.integers(1, 6)
    p = tuple(draw(size) for _ in range(num_cores))
    q = tuple(draw(st.sampled_from([1, 2, 3, 4, 4, 5, 8])) for _ in range(num_cores))
    rank = st.one_of(st.integers(1, 9), st.sampled_from([16, 17, 24, 32, 33, 64, 100, 128]))
    ranks = tuple(draw(rank) for _ in range(num_cores - 1))
    rows = 1
    for factor in p:
        rows *= factor
    return Table(p, q, ranks, draw(st.integers(1, rows)))


FEW = (st.integers(0, 8), st.integers(0, 6))
# Enough for several blocks to have several tiles each.
MANY = (st.sampled_from([30, 100, 700]), st.sampled_from([1, 2, 6, 12]))


@st.composite
def calls(
    draw: st.DrawFn,
    batch_sizes: st.SearchStrategy[int] = FEW[0],
    max_lengths: st.SearchStrategy[int] = FEW[1],
    dtypes: tuple[torch.dtype, ...] = CORE_DTYPES,
) -> Call:
    """Several tables of any shapes, features that share them, all index types, weights or none."""
    drawn = draw(st.lists(tables(), min_size=1, max_size=4))
    features = draw(st.lists(st.integers(0, len(drawn) - 1), min_size=1, max_size=6))
    return make_call(
        drawn,
        feature_table_map=features,
        batch_size=draw(batch_sizes),
        max_length=draw(max_lengths),
        dtype=draw(st.sampled_from(dtypes)),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        offset_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        weighted=draw(st.booleans()),
        pooling_mode=draw(st.integers(0, 1)),
        seed=draw(st.integers(0, 1000)),
    )
