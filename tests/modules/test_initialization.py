"""Variance and mean of freshly initialised tables."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchrec_flowtt.functional import rows, to_dense
from torchrec_flowtt.modules import default_variance, initialize_tt_cores_, second_moment
from torchrec_flowtt.shapes import TTSpec


def fresh_cores(
    spec: TTSpec, variance: float, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Tensor]:
    """Initialised cores of the shape `spec`."""
    cores = [torch.empty(shape, dtype=dtype) for shape in spec.core_shapes]
    initialize_tt_cores_(cores, variance, torch.Generator().manual_seed(seed))
    return cores


@given(
    num_cores=st.integers(2, 4),
    tt_rank=st.sampled_from([1, 2, 7, 32]),
    num_embeddings=st.integers(1, 3000),
    embedding_dim=st.sampled_from([1, 3, 16, 64]),
    variance=st.floats(1e-12, 1e6),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_second_moment_of_the_whole_table_is_exact(
    num_cores: int,
    tt_rank: int,
    num_embeddings: int,
    embedding_dim: int,
    variance: float,
    seed: int,
) -> None:
    spec = TTSpec.suggest(num_embeddings, embedding_dim, tt_ranks=tt_rank, num_cores=num_cores)
    cores = fresh_cores(spec, variance, seed=seed)
    assert second_moment(cores) == pytest.approx(variance, rel=1e-5)
    dense = to_dense([core.double() for core in cores])
    assert dense.square().mean().item() == pytest.approx(variance, rel=1e-5)


def test_second_moment_by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = TTSpec(1000, 12, (10, 10, 10), (2, 3, 2), (5, 4))
    cores = fresh_cores(spec, 1.0)
    exact = to_dense([core.double() for core in cores]).square().mean().item()
    monkeypatch.setattr("torchrec_flowtt.modules.initialization._CHUNK_ELEMENTS", 100)
    assert second_moment(cores) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("num_cores", [2, 3, 4])
@pytest.mark.parametrize("tt_rank", [1, 8, 128])
def test_sampled_rows_have_the_variance_and_mean_zero(num_cores: int, tt_rank: int) -> None:
    spec = TTSpec.suggest(20_000, 32, tt_ranks=tt_rank, num_cores=num_cores)
    variance = default_variance(spec.num_embeddings)
    cores = fresh_cores(spec, variance)
    indices = torch.randint(spec.num_embeddings, (400,), generator=torch.Generator().manual_seed(1))
    sample = rows(cores, indices).double()
    # A table of rank one has rows of very different size, so a sample of them says less.
    assert sample.square().mean().item() == pytest.approx(
        variance, rel=0.5 if tt_rank == 1 else 0.1
    )
    assert abs(sample.mean().item()) < 0.15 * math.sqrt(variance)
    # No column stands out either: the mean over the rows is small in each of them.
    assert sample.mean(0).abs().max().item() < 0.6 * math.sqrt(variance)


@pytest.mark.parametrize("num_cores", [2, 3, 4])
@pytest.mark.parametrize("tt_rank", [1, 16, 100])
def test_slices_have_the_same_norm_in_every_core(num_cores: int, tt_rank: int) -> None:
    spec = TTSpec.suggest(10**6, 64, tt_ranks=tt_rank, num_cores=num_cores)
    cores = fresh_cores(spec, 0.1)
    norms = [core.square().sum().item() / core.shape[0] for core in cores]
    assert max(norms) / min(norms) < 1.0001


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_cores", [2, 3, 4])
@pytest.mark.parametrize("tt_rank", [1, 128])
def test_half_precision_cores_of_a_billion_rows(
    dtype: torch.dtype, num_cores: int, tt_rank: int
) -> None:
    spec = TTSpec(
        10**9,
        64,
        {2: (31623,) * 2, 3: (1000,) * 3, 4: (178,) * 4}[num_cores],
        {2: (8, 8), 3: (8, 1, 8), 4: (8, 1, 1, 8)}[num_cores],
        # The first core of two is large; a lower rank keeps the test small.
        (min(tt_rank, 32 if num_cores == 2 else 128),) * (num_cores - 1),
    )
    variance = default_variance(10**9)
    cores = fresh_cores(spec, variance, dtype)
    for core in cores:
        assert core.isfinite().all()
        # Hardly any element is lost to underflow.
        assert (core == 0).double().mean().item() < 0.01
    assert second_moment(cores) == pytest.approx(variance, rel=0.02)


def test_numbers_that_the_dtype_cannot_hold_are_refused() -> None:
    spec = TTSpec.suggest(1000, 16, tt_ranks=8)
    for variance in (1e-40, 1e40):
        with pytest.raises(ValueError, match=r"variance 1e.40 needs .* core \d .* torch.float16"):
            fresh_cores(spec, variance, torch.float16)
        assert second_moment(fresh_cores(spec, variance)) == pytest.approx(variance, rel=1e-5)


def test_generator_decides_the_numbers() -> None:
    spec = TTSpec.suggest(1000, 16, tt_ranks=8)
    first, again, other = (fresh_cores(spec, 1.0, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_default_is_the_variance_of_torchrec() -> None:
    configs = pytest.importorskip("torchrec.modules.embedding_configs")
    table = configs.EmbeddingBagConfig(
        name="t", num_embeddings=250, embedding_dim=8, feature_names=["f"]
    )
    low, high = table.get_weight_init_min(), table.get_weight_init_max()
    assert default_variance(250) == pytest.approx((high - low) ** 2 / 12)


@pytest.mark.parametrize("variance", [0.0, -1.0, math.nan, math.inf])
def test_variance_must_be_positive_and_finite(variance: float) -> None:
    with pytest.raises(ValueError, match="variance must be positive and finite"):
        fresh_cores(TTSpec.suggest(10, 4, tt_ranks=2), variance)


@pytest.mark.parametrize("variance", ["1", None, True, 1j, torch.tensor(1.0)])
def test_variance_must_be_a_real_number(variance: object) -> None:
    with pytest.raises(TypeError, match="variance must be a real number, got "):
        fresh_cores(TTSpec.suggest(10, 4, tt_ranks=2), variance)  # type: ignore[arg-type]


def test_meta_cores_are_left_alone() -> None:
    spec = TTSpec.suggest(10**12, 64, tt_ranks=64)
    initialize_tt_cores_([torch.empty(shape, device="meta") for shape in spec.core_shapes], 1.0)
