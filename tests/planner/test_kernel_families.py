from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_flowtt.planner.kernel_families import lookup_work
from torchrec_flowtt.shapes import TTSpec


@pytest.mark.parametrize(
    ("num_embeddings", "shape", "family", "flops"),
    [
        # G1 G2 of 16 rows, then 16 rows times q3 columns, with the ranks padded.
        (10_000_000, {"embedding_dim": 128, "tt_ranks": 32}, "tiled", 2 * 16 * 32 * (32 + 8)),
        (10_000_000, {"embedding_dim": 64, "tt_ranks": 9}, "tiled", 2 * 16 * 16 * (16 + 4)),
        (10_000_000, {"embedding_dim": 128, "tt_ranks": 33}, "wide", 2 * 16 * 64 * (64 + 8)),
        (10_000_000, {"embedding_dim": 256, "tt_ranks": 32}, "wide", None),
        (10_000_000, {"embedding_dim": 128, "tt_ranks": 129}, "general", None),
        (10_000_000, {"embedding_dim": 128, "tt_ranks": (40,)}, "two_core", 2 * 128 * 64),
        (10_000_000, {"embedding_dim": 128, "tt_ranks": (129,)}, "general", None),
        (10_000_000, {"embedding_dim": 32, "tt_ranks": 16, "num_cores": 4}, "tiled_pairs", None),
        (10_000_000, {"embedding_dim": 128, "tt_ranks": 32, "num_cores": 4}, "wide_pairs", None),
        # A slice of core 3 that is too large for shared memory.
        (10_000_000, {"embedding_dim": 128, "tt_ranks": 64, "num_cores": 4}, "general", None),
        # Too many pairs of the last two cores.
        (10**10, {"embedding_dim": 32, "tt_ranks": 16, "num_cores": 4}, "general", None),
        (10**15, {"embedding_dim": 128, "tt_ranks": 32}, "general", None),
    ],
)
def test_families(num_embeddings: int, shape: dict, family: str, flops: int | None) -> None:
    spec = TTSpec.suggest(num_embeddings, **shape)
    work = lookup_work(spec, "cuda")
    assert work.family == family
    assert work.columns == spec.embedding_dim
    assert work.flops == (work.flops if flops is None else flops)
    assert lookup_work(spec, "cpu").family == "cpu"


@given(
    rows=st.integers(1, 10**12),
    columns=st.integers(1, 512),
    cores=st.integers(2, 4),
    rank=st.integers(1, 200),
)
def test_padding_never_saves_work(rows: int, columns: int, cores: int, rank: int) -> None:
    spec = TTSpec.suggest(rows, columns, tt_ranks=rank, num_cores=cores)
    work = lookup_work(spec, "cuda")
    if work.family.endswith("_pairs"):  # the pairs are formed once, not for each lookup
        assert work.flops > 0
    else:
        assert work.flops >= spec.flops_per_lookup
