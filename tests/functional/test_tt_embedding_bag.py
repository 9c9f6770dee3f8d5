"""tt_embedding_bag against torch's embedding_bag on the reconstructed table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tests.tolerances import TOLERANCES, assert_close
from torchrec_flowtt.functional import PoolingMode, to_dense, tt_embedding_bag
from torchrec_flowtt.shapes import TTSpec

SPEC = TTSpec(22, 12, p_shapes=(2, 3, 4), q_shapes=(2, 3, 2), tt_ranks=(4, 5))


def make_cores(
    dtype: torch.dtype = torch.float64, seed: int = 0, spec: TTSpec = SPEC
) -> list[Tensor]:
    """Gaussian cores that require a gradient; the reconstructed entries are of order one."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64) / shape[3] ** 0.5)
        .to(dtype)
        .requires_grad_()
        for shape in spec.core_shapes
    ]


def reference(
    indices: Tensor, table: Tensor, offsets: Tensor, weights: Tensor | None, mode: str
) -> Tensor:
    """Bags of rows of `table`; `offsets` ends with nnz. Weighted means divide by the length."""
    lengths = offsets.long().diff()
    bags = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    picked = table[indices.long()]
    if weights is not None:
        picked = picked * weights[:, None].to(picked.dtype)
    output = torch.zeros(lengths.numel(), table.shape[1], dtype=table.dtype)
    output = output.index_add(0, bags, picked)
    return output / lengths.clamp(min=1)[:, None] if mode == "mean" else output


@st.composite
def lookups(draw: st.DrawFn) -> dict[str, Any]:
    """Bags of any length, also none at all, in any combination of integer types."""
    lengths = draw(st.lists(st.integers(0, 5), max_size=6))
    indices = draw(
        st.lists(
            st.integers(0, SPEC.num_embeddings - 1), min_size=sum(lengths), max_size=sum(lengths)
        )
    )
    integers = st.sampled_from([torch.int32, torch.int64])
    return {
        "indices": torch.tensor(indices, dtype=draw(integers)),
        "offsets": torch.tensor([0, *lengths]).cumsum(0).to(draw(integers)),
        "mode": draw(st.sampled_from(["sum", "mean"])),
        "weighted": draw(st.booleans()),
        "include_last_offset": draw(st.booleans()),
    }


@given(lookups(), st.sampled_from(list(TOLERANCES)))
@settings(max_examples=80, deadline=None)
def test_output_and_gradients(lookup: dict[str, Any], dtype: torch.dtype) -> None:
    indices, offsets, mode = lookup["indices"], lookup["offsets"], lookup["mode"]
    cores = make_cores(dtype)
    exact_cores = [core.detach().double().requires_grad_() for core in cores]
    weights = exact_weights = None
    if lookup["weighted"]:
        weights = torch.linspace(-1, 2, indices.numel(), dtype=dtype).requires_grad_()
        exact_weights = weights.detach().double().requires_grad_()
    given_offsets = offsets if lookup["include_last_offset"] else offsets[:-1]

    output = tt_embedding_bag(
        indices,
        cores,
        given_offsets,
        num_embeddings=SPEC.num_embeddings,
        mode=mode,
        per_sample_weights=weights,
        include_last_offset=lookup["include_last_offset"],
    )
    table = to_dense(exact_cores, SPEC.num_embeddings)
    expected = reference(indices, table, offsets, exact_weights, mode)
    # The same of magnitudes: what may have cancelled.
    core_terms = [core.detach().abs().requires_grad_() for core in exact_cores]
    weight_terms = None
    if exact_weights is not None:
        weight_terms = exact_weights.detach().abs().requires_grad_()
    table_terms = to_dense(core_terms, SPEC.num_embeddings)
    terms = reference(indices, table_terms, offsets, weight_terms, mode)
    assert output.dtype == dtype
    assert output.shape == (offsets.numel() - 1, SPEC.embedding_dim)
    assert_close(output, expected, "output", terms=terms)

    grad = torch.linspace(-1, 1, output.numel(), dtype=dtype).reshape(output.shape)
    output.backward(grad)
    expected.backward(grad.double())
    terms.backward(grad.double().abs())
    triples = list(zip(cores, exact_cores, core_terms, strict=True))
    if weights is not None and exact_weights is not None and weight_terms is not None:
        triples.append((weights, exact_weights, weight_terms))
    for tensor, exact, of_terms in triples:
        assert tensor.grad is not None and exact.grad is not None
        assert tensor.grad.dtype == dtype
        assert_close(tensor.grad, exact.grad, "gradient", slack=4, terms=of_terms.grad)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_agrees_with_torch_embedding_bag(mode: str) -> None:
    cores = make_cores()
    table = to_dense(cores, SPEC.num_embeddings)
    indices, offsets = torch.tensor([1, 21, 21, 0, 7]), torch.tensor([0, 2, 2])
    torch.testing.assert_close(
        tt_embedding_bag(indices, cores, offsets, mode=mode),
        F.embedding_bag(indices, table, offsets, mode=mode),
    )
    matrix = torch.tensor([[1, 2, 2], [21, 0, 5]])
    torch.testing.assert_close(
        tt_embedding_bag(matrix, cores, mode=mode), F.embedding_bag(matrix, table, mode=mode)
    )
    weights = torch.rand(2, 3, dtype=torch.float64)
    torch.testing.assert_close(
        tt_embedding_bag(matrix, cores, per_sample_weights=weights, mode="sum"),
        F.embedding_bag(matrix, table, mode="sum", per_sample_weights=weights),
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("bags", "length"), [(0, 3), (3, 0), (0, 0), (4, 1)])
def test_two_dimensional_indices(dtype: torch.dtype, bags: int, length: int) -> None:
    cores = make_cores()
    indices = torch.arange(bags * length).reshape(bags, length).to(dtype)
    expected = to_dense(cores)[indices.long()].sum(1)
    torch.testing.assert_close(tt_embedding_bag(indices, cores, mode="sum"), expected)
    # The bags are given by the rows, whatever the flag says.
    torch.testing.assert_close(
        tt_embedding_bag(indices, cores, include_last_offset=True, mode="sum"), expected
    )


def test_non_contiguous_arguments() -> None:
    cores = make_cores()
    indices = torch.tensor([[1, 5], [2, 6], [3, 7]])
    table = to_dense(cores)
    torch.testing.assert_close(
        tt_embedding_bag(indices.t(), cores, mode="sum"), table[indices.t()].sum(1)
    )
    torch.testing.assert_close(
        tt_embedding_bag(torch.arange(10)[::2], cores, torch.tensor([0, 9, 1, 9])[::2], mode="sum"),
        torch.stack([table[0], table[[2, 4, 6, 8]].sum(0)]),
    )
    output = tt_embedding_bag(indices, cores, mode="sum")
    output.backward(torch.ones(12, 3, dtype=torch.float64).t())
    strided = [core.grad for core in cores]
    for core in cores:
        core.grad = None
    tt_embedding_bag(indices, cores, mode="sum").sum().backward()
    torch.testing.assert_close(strided, [core.grad for core in cores])


@pytest.mark.parametrize("output_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_output_dtype(dtype: torch.dtype, output_dtype: torch.dtype) -> None:
    cores = make_cores(dtype)
    indices = torch.tensor([[3, 4, 21]])
    output = tt_embedding_bag(indices, cores, output_dtype=output_dtype, mode="sum")
    assert output.dtype == output_dtype
    exact = to_dense([core.double() for core in cores])[indices].sum(1)
    assert_close(output, exact, "output")
    output.sum().backward()
    assert all(core.grad is not None and core.grad.dtype == dtype for core in cores)


def test_autocast_changes_nothing() -> None:
    cores = make_cores(torch.float32)
    indices = torch.tensor([[3, 4, 21], [0, 0, 7]])
    weights = torch.rand(2, 3)
    plain = tt_embedding_bag(indices, cores, per_sample_weights=weights, mode="sum")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = tt_embedding_bag(indices, cores, per_sample_weights=weights, mode="sum")
    assert cast.dtype == torch.float32
    assert torch.equal(plain, cast)


def test_no_grad_and_inference_mode() -> None:
    cores = make_cores()
    indices = torch.tensor([[3, 4, 21]])
    expected = tt_embedding_bag(indices, cores, mode="sum").detach()
    with torch.no_grad():
        output = tt_embedding_bag(indices, cores, mode="sum")
    assert not output.requires_grad
    assert torch.equal(output, expected)
    with torch.inference_mode():
        assert torch.equal(tt_embedding_bag(indices, cores, mode="sum"), expected)


def test_gradcheck() -> None:
    cores = make_cores()
    indices, offsets = torch.tensor([3, 4, 21, 3]), torch.tensor([0, 3, 3])
    weights = torch.rand(4, dtype=torch.float64, requires_grad=True)
    for mode in ("sum", "mean"):

        def function(weights: Tensor, *cores: Tensor, mode: str = mode) -> Tensor:
            return tt_embedding_bag(indices, cores, offsets, mode=mode, per_sample_weights=weights)

        assert torch.autograd.gradcheck(function, (weights, *cores))


def test_double_backward_is_refused() -> None:
    cores = make_cores()
    output = tt_embedding_bag(torch.tensor([[3, 4]]), cores, mode="sum")
    (grad,) = torch.autograd.grad(output.square().sum(), cores[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once only"):
        grad.sum().backward()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_graph_breaks(dynamic: bool) -> None:
    cores = make_cores(torch.float32)

    def function(indices: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        return 2 * tt_embedding_bag(
            indices, cores, offsets, mode="mean", per_sample_weights=weights
        )

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    indices, offsets = torch.tensor([3, 4, 21, 3]), torch.tensor([0, 3, 3])
    weights = torch.rand(4)
    with torch.no_grad():
        assert torch.equal(compiled(indices, offsets, weights), function(indices, offsets, weights))
    compiled(indices, offsets, weights).sum().backward()
    grads = [core.grad for core in cores]
    for core in cores:
        core.grad = None
    function(indices, offsets, weights).sum().backward()
    torch.testing.assert_close(grads, [core.grad for core in cores])


INDICES, OFFSETS = torch.tensor([1, 2, 3]), torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"indices": [1, 2]}, TypeError, "indices must be a Tensor, got list"),
        ({"indices": INDICES.float()}, TypeError, "indices must be int32 or int64"),
        ({"offsets": OFFSETS.double()}, TypeError, "offsets must be int32 or int64"),
        ({"offsets": None}, ValueError, "offsets must be a 1-D tensor .* got None"),
        ({"offsets": OFFSETS[None]}, ValueError, "offsets must be 1-D, got shape"),
        ({"indices": INDICES[None]}, ValueError, "offsets must be None when indices is 2-D"),
        ({"indices": INDICES[None, None]}, ValueError, "indices must be 1-D or 2-D"),
        (
            {"mode": "max"},
            ValueError,
            "pooling mode must be one of 'sum', 'mean' for bags, got 'max'",
        ),
        ({"num_embeddings": 25}, ValueError, "num_embeddings must be 1 to 24.*got 25"),
        ({"num_embeddings": 0}, ValueError, "num_embeddings must be 1 to 24.*got 0"),
        ({"num_embeddings": 22.0}, TypeError, r"num_embeddings must be an integer, got 22\.0"),
        (
            {"per_sample_weights": torch.ones(2)},
            ValueError,
            r"per_sample_weights must have the shape of indices, \(3,\), got \(2,\)",
        ),
        (
            {"per_sample_weights": torch.ones(3, dtype=torch.int64)},
            TypeError,
            "per_sample_weights must have a floating-point dtype, got torch.int64",
        ),
        ({"per_sample_weights": [1.0] * 3}, TypeError, "per_sample_weights must be a Tensor, got"),
        ({"output_dtype": torch.float32}, TypeError, "output_dtype must be one of torch.float64"),
        (
            {"offsets": OFFSETS[:0], "include_last_offset": True},
            ValueError,
            "offsets must have at least one element",
        ),
        ({"offsets": OFFSETS.to("meta")}, ValueError, "offsets must be on the device .* got meta"),
    ],
)
def test_errors_name_the_argument(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {"indices": INDICES, "cores": make_cores(), "offsets": OFFSETS, **changes}
    with pytest.raises(error, match=message):
        tt_embedding_bag(**arguments)


@pytest.mark.parametrize("index", [-1, 22, 2**40])
def test_an_index_outside_the_table_is_refused(index: int) -> None:
    indices = torch.tensor([1, index])
    with pytest.raises((IndexError, ValueError, RuntimeError), match=str(index)):
        tt_embedding_bag(indices, make_cores(), torch.tensor([0]), num_embeddings=22, mode="sum")


def test_forward_mode_is_refused_not_dropped() -> None:
    cores = make_cores()
    tangents = [torch.randn_like(core) for core in cores]
    matrix = torch.tensor([[1, 2]])
    with pytest.raises(NotImplementedError, match="forward-mode derivative"):
        torch.func.jvp(lambda *c: tt_embedding_bag(matrix, c), tuple(cores), tuple(tangents))
    with torch.autograd.forward_ad.dual_level():
        weights = torch.autograd.forward_ad.make_dual(torch.ones(1, 2), torch.ones(1, 2))
        with pytest.raises(NotImplementedError, match="forward-mode derivative"):
            tt_embedding_bag(matrix, [c.float() for c in cores], per_sample_weights=weights)
        tt_embedding_bag(matrix, cores)


def test_pooling_mode_values() -> None:
    assert PoolingMode.of(0) is PoolingMode.SUM
    assert PoolingMode.of(PoolingMode.MEAN) is PoolingMode.MEAN
    fbgemm = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    assert PoolingMode.of(fbgemm.PoolingMode.MEAN) is PoolingMode.MEAN
    assert PoolingMode.of(fbgemm.PoolingMode.NONE) is PoolingMode.NONE
    with pytest.raises(ValueError, match="pooling mode must be one of"):
        PoolingMode.of(3)
    with pytest.raises(ValueError, match="'sum', 'mean' for bags, got 'none'.*tt_embedding"):
        PoolingMode.of_bags("none")
