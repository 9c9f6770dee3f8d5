"""FlowTTEmbeddingBag beside nn.EmbeddingBag on the reconstructed table."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from torchrec_flowtt.modules import FlowTTEmbeddingBag, second_moment
from torchrec_flowtt.shapes import TTSpec

SPEC = TTSpec(22, 12, p_shapes=(2, 3, 4), q_shapes=(2, 3, 2), tt_ranks=(4, 5), name="ads")


def twins(**kwargs: Any) -> tuple[FlowTTEmbeddingBag, nn.EmbeddingBag]:
    """A TT table and torch's module that holds the same rows."""
    bag = FlowTTEmbeddingBag(SPEC, init_variance=1.0, **kwargs)
    keep = ("mode", "include_last_offset", "dtype")
    plain = nn.EmbeddingBag(22, 12, **{key: kwargs[key] for key in keep if key in kwargs})
    with torch.no_grad():
        plain.weight.copy_(bag.to_dense())
    return bag, plain


@pytest.mark.parametrize("mode", [None, "sum", "mean"])
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_calls_as_embedding_bag(mode: str | None, include_last_offset: bool) -> None:
    chosen = {} if mode is None else {"mode": mode}
    bag, plain = twins(include_last_offset=include_last_offset, dtype=torch.float64, **chosen)
    assert bag.mode == plain.mode
    indices, offsets = torch.tensor([1, 21, 21, 0, 7]), torch.tensor([0, 2, 2, 5])
    torch.testing.assert_close(bag(indices, offsets), plain(indices, offsets))
    torch.testing.assert_close(bag(indices, offsets=offsets), plain(indices, offsets=offsets))
    if not include_last_offset:
        matrix = indices[:4].reshape(2, 2)
        torch.testing.assert_close(bag(matrix), plain(matrix))
        if mode == "sum":
            weights = torch.rand(2, 2, dtype=torch.float64)
            torch.testing.assert_close(bag(matrix, None, weights), plain(matrix, None, weights))


def test_trains_as_the_dense_table_would() -> None:
    torch.manual_seed(0)
    bag, _ = twins(mode="mean", dtype=torch.float64)
    indices, target = torch.tensor([[1, 21], [3, 3], [7, 0]]), torch.randn(3, 12).double()
    reference = copy.deepcopy(bag)
    for model, dense in ((bag, False), (reference, True)):
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            output = model.to_dense()[indices].mean(1) if dense else model(indices)
            nn.functional.mse_loss(output, target).backward()
            optimizer.step()
    torch.testing.assert_close(bag.to_dense(), reference.to_dense())


def test_constructors_agree() -> None:
    by_sizes = FlowTTEmbeddingBag(1000, 16, tt_ranks=8, name="ads")
    assert by_sizes.spec == TTSpec.suggest(1000, 16, tt_ranks=8)
    assert by_sizes.spec.name == "ads"
    assert (by_sizes.num_embeddings, by_sizes.embedding_dim) == (1000, 16)
    exact = FlowTTEmbeddingBag(
        22, 12, tt_ranks=(4, 5), p_shapes=(2, 3, 4), q_shapes=(2, 3, 2), mode="sum"
    )
    assert exact.spec == FlowTTEmbeddingBag.from_spec(SPEC, mode="sum").spec == SPEC
    assert [tuple(core.shape) for core in exact.tt_cores] == list(SPEC.core_shapes)
    assert FlowTTEmbeddingBag(1000, 16, tt_ranks=8, num_cores=2).spec.num_cores == 2


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((1000, 16), {}, TypeError, "tt_ranks must be given"),
        ((1000,), {"tt_ranks": 4}, TypeError, "embedding_dim must be given"),
        ((SPEC, 12), {}, ValueError, "must not be given beside a TTSpec"),
        ((SPEC,), {"mode": "max"}, ValueError, "pooling mode must be one of .* got 'max'"),
        ((SPEC,), {"output_dtype": torch.int32}, TypeError, "output_dtype must be one of"),
        ((SPEC,), {"init_variance": 0.0}, ValueError, "variance must be positive"),
        ((1000, 16), {"tt_ranks": 4, "p_shapes": (9, 9, 9)}, ValueError, "p_shapes must be at"),
    ],
)
def test_constructor_errors(
    args: tuple[Any, ...], kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        FlowTTEmbeddingBag(*args, **kwargs)


def test_row_and_to_dense() -> None:
    bag = FlowTTEmbeddingBag(SPEC)
    dense = bag.to_dense()
    assert dense.shape == (22, 12)
    for index in (0, 7, 21):
        torch.testing.assert_close(bag.row(index), dense[index])
    for index in (-1, 22):
        with pytest.raises(IndexError, match=rf"'ads'.*index must be in \[0, 22\), got {index}"):
            bag.row(index)
    with pytest.raises(TypeError):
        bag.row(1.0)  # type: ignore[arg-type]
    bag.row(3).sum().backward()
    grad = bag.tt_cores[0].grad
    assert grad is not None and grad[0].abs().sum() > 0 and grad[1].abs().sum() == 0


def test_state_dict_round_trip() -> None:
    bag, other = FlowTTEmbeddingBag(SPEC), FlowTTEmbeddingBag(SPEC)
    assert list(bag.state_dict()) == ["tt_cores.0", "tt_cores.1", "tt_cores.2"]
    buffer = io.BytesIO()
    torch.save(bag.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    assert torch.equal(bag.to_dense(), other.to_dense())
    wrong = FlowTTEmbeddingBag(22, 12, tt_ranks=3)
    with pytest.raises(RuntimeError, match="size mismatch for tt_cores.0"):
        wrong.load_state_dict(bag.state_dict())


def test_deepcopy_and_pickle() -> None:
    bag = FlowTTEmbeddingBag(SPEC, mode="sum", output_dtype=torch.float16)
    indices = torch.tensor([[3, 4]])
    for copied in (copy.deepcopy(bag), pickle.loads(pickle.dumps(bag))):
        assert torch.equal(copied(indices), bag(indices))
        assert copied.spec == bag.spec
        assert copied.tt_cores[0].data_ptr() != bag.tt_cores[0].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtype_conversion(dtype: torch.dtype) -> None:
    bag = FlowTTEmbeddingBag(SPEC, init_variance=1.0)
    expected = bag.to_dense()
    bag.to(dtype)
    assert bag(torch.tensor([[3]])).dtype == dtype
    assert (bag.to_dense() - expected).abs().max() < 0.1
    fixed = FlowTTEmbeddingBag(SPEC, output_dtype=torch.bfloat16).half()
    assert fixed(torch.tensor([[3]])).dtype == torch.bfloat16
    assert fixed.double()(torch.tensor([[3]])).dtype == torch.float64


def test_meta_construction() -> None:
    bag = FlowTTEmbeddingBag(10**12, 64, tt_ranks=64, device="meta")
    assert all(core.is_meta for core in bag.tt_cores)
    assert bag(torch.empty(4, 3, dtype=torch.int64, device="meta")).shape == (4, 64)
    small = FlowTTEmbeddingBag(SPEC, device="meta").to_empty(device="cpu")
    small.reset_parameters()
    assert second_moment(list(small.tt_cores)) == pytest.approx(1 / 66, rel=1e-5)


def test_default_variance_and_generator() -> None:
    bag = FlowTTEmbeddingBag(SPEC)
    assert second_moment(list(bag.tt_cores)) == pytest.approx(1 / 66, rel=1e-5)
    bag.reset_parameters(torch.Generator().manual_seed(5))
    first = bag.to_dense()
    bag.reset_parameters(torch.Generator().manual_seed(5))
    assert torch.equal(bag.to_dense(), first)


def test_compiles_for_inference() -> None:
    bag = FlowTTEmbeddingBag(SPEC).eval()
    compiled = torch.compile(bag, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for bags in (2, 3):
            indices, offsets = torch.arange(10), torch.arange(bags)
            assert torch.equal(compiled(indices, offsets), bag(indices, offsets))


def test_repr() -> None:
    text = repr(FlowTTEmbeddingBag(SPEC, include_last_offset=True, output_dtype=torch.float16))
    for part in (
        "22, 12, tt_ranks=(4, 5), p_shapes=(2, 3, 4), q_shapes=(2, 3, 2)",
        "mode='mean'",
        "include_last_offset=True",
        "output_dtype=torch.float16",
    ):
        assert part in text


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e5m2])
def test_a_dtype_without_kernels_is_refused_when_built(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"dtype must be one of torch.float32.*got {dtype}"):
        FlowTTEmbeddingBag(100, 8, tt_ranks=2, dtype=dtype)
