"""TTSpec: validation, counts and suggestions."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_flowtt.shapes import TTSpec

VALID: dict[str, Any] = {
    "num_embeddings": 1000,
    "embedding_dim": 16,
    "p_shapes": (10, 10, 10),
    "q_shapes": (2, 2, 4),
    "tt_ranks": (8, 4),
    "name": "ads",
}


def test_counts_of_the_worked_shape() -> None:
    spec = TTSpec(**VALID)
    assert spec.num_cores == 3
    assert spec.core_shapes == ((10, 1, 2, 8), (10, 8, 2, 4), (10, 4, 4, 1))
    assert spec.num_parameters == 160 + 640 + 160
    assert spec.num_bytes() == 4 * 960
    assert spec.num_bytes(torch.bfloat16) == 2 * 960
    assert spec.compression_ratio == pytest.approx(16_000 / 960)
    # 2 x 8 by 8 x (2 * 4), then (2 * 2) x 4 by 4 x 4; two operations a multiply-add.
    assert spec.flops_per_lookup == 2 * 2 * 8 * 8 + 2 * 4 * 4 * 4
    assert spec.max_useful_ranks == (20, 40)


def test_counts_do_not_overflow_64_bits() -> None:
    spec = TTSpec.suggest(2**40, 4096, tt_ranks=1024, num_cores=2)
    assert spec.num_embeddings * spec.embedding_dim == 2**52
    assert spec.num_parameters == 2**20 * 64 * 1024 * 2


def test_is_frozen_hashable_and_picklable() -> None:
    spec = TTSpec(**VALID)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.num_embeddings = 3  # type: ignore[misc]
    assert spec == TTSpec(**{**VALID, "name": "other"})
    assert hash(spec) == hash(TTSpec(**{**VALID, "name": "other"}))
    assert spec != TTSpec(**{**VALID, "tt_ranks": (8, 5)})
    restored = pickle.loads(pickle.dumps(spec))
    assert restored == spec
    assert restored.name == "ads"


def test_sequences_and_numpy_integers_are_normalised() -> None:
    spec = TTSpec(np.int64(1000), 16, [10, 10, 10], [2, 2, 4], [np.int32(8), 4])  # type: ignore[arg-type]
    assert spec == TTSpec(**VALID)
    assert type(spec.num_embeddings) is int
    assert spec.p_shapes == (10, 10, 10)
    assert all(type(rank) is int for rank in spec.tt_ranks)


def test_a_rank_above_the_useful_one_is_allowed() -> None:
    assert TTSpec(4, 4, (2, 2), (2, 2), (100,)).num_parameters == 2 * 2 * 2 * 100


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"tt_ranks": (8, 4, 2, 2)}, ValueError, ["tt_ranks", "2 inner ranks", "3 cores", "got 4"]),
        ({"tt_ranks": (8,)}, ValueError, ["tt_ranks", "2 inner ranks", "got 1"]),
        ({"tt_ranks": (8, 0)}, ValueError, ["tt_ranks[1]", "positive", "got 0"]),
        ({"tt_ranks": (8, -3)}, ValueError, ["tt_ranks[1]", "positive", "got -3"]),
        ({"tt_ranks": (8, 4.0)}, TypeError, ["tt_ranks[1]", "integer", "4.0 (float)"]),
        ({"tt_ranks": (8, True)}, TypeError, ["tt_ranks[1]", "integer", "True (bool)"]),
        ({"tt_ranks": 8}, TypeError, ["tt_ranks", "sequence", "8 (int)"]),
        ({"tt_ranks": "84"}, TypeError, ["tt_ranks", "sequence", "'84' (str)"]),
        ({"num_embeddings": 0}, ValueError, ["num_embeddings", "positive", "got 0"]),
        ({"num_embeddings": True}, TypeError, ["num_embeddings", "integer", "True (bool)"]),
        ({"num_embeddings": 1e3}, TypeError, ["num_embeddings", "integer", "1000.0 (float)"]),
        ({"num_embeddings": None}, TypeError, ["num_embeddings", "integer", "None"]),
        ({"num_embeddings": 1001}, ValueError, ["p_shapes", "at least", "1001", "got 1000"]),
        ({"embedding_dim": -16}, ValueError, ["embedding_dim", "positive", "got -16"]),
        ({"embedding_dim": 17}, ValueError, ["q_shapes", "embedding_dim 17", "got 16"]),
        ({"q_shapes": (4, 4)}, ValueError, ["q_shapes", "3 factors", "got 2"]),
        ({"p_shapes": (1000,)}, ValueError, ["p_shapes", "2 to 4", "got 1"]),
        ({"p_shapes": (4,) * 5}, ValueError, ["p_shapes", "2 to 4", "got 5"]),
        ({"p_shapes": (2**31,) * 3}, ValueError, ["p_shapes", "64-bit", f"{2**93}"]),
        ({"p_shapes": (10, 10, "10")}, TypeError, ["p_shapes[2]", "integer", "'10' (str)"]),
    ],
)
def test_errors_name_table_argument_and_values(
    changes: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        TTSpec(**{**VALID, **changes})
    for word in ["TT table 'ads'", *words]:
        assert word in str(caught.value)


@given(
    num_embeddings=st.integers(1, 2**50),
    embedding_dim=st.integers(1, 2048),
    num_cores=st.integers(2, 4),
    tt_ranks=st.integers(1, 256),
)
def test_suggest_by_rank(
    num_embeddings: int, embedding_dim: int, num_cores: int, tt_ranks: int
) -> None:
    spec = TTSpec.suggest(num_embeddings, embedding_dim, tt_ranks=tt_ranks, num_cores=num_cores)
    assert spec.num_cores == num_cores
    assert spec.tt_ranks == (tt_ranks,) * (num_cores - 1)
    assert math.prod(spec.q_shapes) == embedding_dim
    assert math.prod(spec.p_shapes) >= num_embeddings
    assert spec == TTSpec.suggest(
        num_embeddings, embedding_dim, tt_ranks=tt_ranks, num_cores=num_cores
    )


@given(
    num_embeddings=st.integers(1, 2**40),
    embedding_dim=st.integers(1, 512),
    num_cores=st.integers(2, 4),
    max_bytes=st.integers(1, 2**34),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_suggest_by_bytes_takes_the_largest_rank_that_fits(
    num_embeddings: int, embedding_dim: int, num_cores: int, max_bytes: int, dtype: torch.dtype
) -> None:
    smallest = TTSpec.suggest(num_embeddings, embedding_dim, tt_ranks=1, num_cores=num_cores)
    if smallest.num_bytes(dtype) > max_bytes:
        with pytest.raises(ValueError, match="even rank 1 needs"):
            TTSpec.suggest(
                num_embeddings,
                embedding_dim,
                num_cores=num_cores,
                max_bytes=max_bytes,
                dtype=dtype,
            )
        return
    spec = TTSpec.suggest(
        num_embeddings, embedding_dim, num_cores=num_cores, max_bytes=max_bytes, dtype=dtype
    )
    assert spec.num_bytes(dtype) <= max_bytes
    rank, useful = max(spec.tt_ranks), spec.max_useful_ranks
    assert spec.tt_ranks == tuple(min(rank, limit) for limit in useful)
    if rank < max(useful):
        larger = dataclasses.replace(spec, tt_ranks=tuple(min(rank + 1, limit) for limit in useful))
        assert larger.num_bytes(dtype) > max_bytes


def test_suggest_known_tables() -> None:
    spec = TTSpec.suggest(10_000_000, 128, tt_ranks=32)
    assert (spec.p_shapes, spec.q_shapes) == ((216, 215, 216), (4, 4, 8))
    assert math.prod(spec.p_shapes) / 10_000_000 < 1.005
    assert TTSpec.suggest(10_000_000, 128, tt_ranks=32, num_cores=2).q_shapes == (8, 16)
    assert TTSpec.suggest(1, 1, tt_ranks=1).num_parameters == 3


def test_suggest_keeps_what_is_given() -> None:
    spec = TTSpec.suggest(1000, 16, tt_ranks=(8, 4), p_shapes=(10, 10, 10), q_shapes=(2, 2, 4))
    assert spec == TTSpec(**VALID)
    assert TTSpec.suggest(1000, 16, tt_ranks=(8,)).num_cores == 2
    assert TTSpec.suggest(1000, 16, tt_ranks=np.int64(8), q_shapes=(2, 8)).num_cores == 2  # type: ignore[arg-type]
    assert TTSpec.suggest(1000, 16, tt_ranks=8, name="ads").name == "ads"
    assert TTSpec.suggest(1000, 16, tt_ranks=8, max_bytes=10**6).tt_ranks == (8, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, ValueError, ["tt_ranks or max_bytes"]),
        ({"tt_ranks": 0}, ValueError, ["tt_ranks", "positive", "got 0"]),
        ({"tt_ranks": 2.0}, TypeError, ["tt_ranks", "integer", "2.0 (float)"]),
        ({"tt_ranks": True}, TypeError, ["tt_ranks", "integer", "True (bool)"]),
        ({"tt_ranks": (4,), "num_cores": 3}, ValueError, ["tt_ranks", "2 inner ranks", "got 1"]),
        ({"tt_ranks": (1, 1, 1, 1)}, ValueError, ["num_cores", "2 to 4", "got 5"]),
        ({"tt_ranks": 4, "num_cores": 5}, ValueError, ["num_cores", "2 to 4", "got 5"]),
        ({"tt_ranks": 4, "num_cores": 1}, ValueError, ["num_cores", "2 to 4", "got 1"]),
        (
            {"tt_ranks": 4, "p_shapes": (40, 40), "num_cores": 3},
            ValueError,
            ["p_shapes", "3 factors", "got 2"],
        ),
        ({"tt_ranks": 4, "p_shapes": (9, 9, 9)}, ValueError, ["p_shapes", "at least", "1000"]),
        ({"max_bytes": 100}, ValueError, ["max_bytes 100", "rank 1", "float32"]),
        ({"tt_ranks": 64, "max_bytes": 500}, ValueError, ["max_bytes is 500", "(64, 64)"]),
        ({"max_bytes": -1}, ValueError, ["max_bytes", "positive", "got -1"]),
    ],
)
def test_suggest_errors(
    arguments: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        TTSpec.suggest(1000, 16, name="ads", **arguments)
    for word in ["TT table 'ads'", *words]:
        assert word in str(caught.value)
