"""Values of the forward and of all gradients, against the dense reconstruction in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchrec_flowtt.ops  # noqa: F401
from tests import reference
from tests.ops.call_strategies import calls, output_dtypes
from tests.ops.random_calls import Call, Table, random_call, random_grad
from tests.tolerances import assert_close

ops = torch.ops.flowtt


def check_forward(call: Call, output_dtype: torch.dtype) -> None:
    output = ops.tt_embedding_bag(call.cores, *call.bags.arguments(), output_dtype, False, False)
    assert output.dtype == output_dtype and output.is_contiguous()
    expected = reference.embedding_bag(call.cores, call.bags)
    terms = reference.embedding_bag(*reference.magnitudes(call.cores, call.bags))
    assert_close(output, expected, "output", slack=2, terms=terms)


def check_gradients(call: Call, grad_output: torch.Tensor) -> None:
    arguments = (grad_output, call.cores, *call.bags.arguments())
    expected = reference.gradients(call.cores, call.bags, grad_output)
    magnitudes = reference.magnitudes(call.cores, call.bags)
    terms = reference.gradients(*magnitudes, grad_output.abs())
    core_grads = ops.tt_embedding_bag_backward(*arguments)
    assert len(core_grads) == len(call.cores)
    for k, (core, actual) in enumerate(zip(call.cores, core_grads, strict=True)):
        assert actual.dtype == core.dtype and actual.is_contiguous()
        what = f"gradient of core {k}"
        assert_close(actual, expected.cores[k], what, slack=2, terms=terms.cores[k])
    if expected.weights is not None:
        actual = ops.tt_embedding_bag_weights_grad(*arguments)
        what = "gradient of the weights"
        assert_close(actual, expected.weights, what, slack=2, terms=terms.weights)


@settings(max_examples=50, deadline=None)
@given(call=calls(), data=st.data())
def test_forward_of_any_call(call: Call, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(output_dtypes(call.cores[0].dtype)))
    check_forward(call, dtype)


@settings(max_examples=50, deadline=None)
@given(call=calls(), data=st.data())
def test_gradients_of_any_call(call: Call, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(output_dtypes(call.cores[0].dtype)))
    check_gradients(call, random_grad(call, dtype))


# The workload of the benchmark, small; two cores; four cores; D = 1; primes; a last factor long
# enough to be the vectorised one; a slice larger than the L1 cache.
SHAPES = {
    "three cores": Table((20, 22, 25), (4, 4, 4), (16, 16)),
    "two cores": Table((90, 110), (8, 16), (32,)),
    "four cores": Table((5, 7, 6, 9), (2, 4, 4, 2), (8, 16, 8)),
    "one column": Table((11, 13, 17), (1, 1, 1), (5, 3)),
    "primes": Table((7, 11, 13), (3, 5, 7), (11, 13)),
    "long last factor": Table((7, 11, 13), (2, 2, 32), (8, 8)),
    "long first factor": Table((17, 19), (32, 2), (24,)),
    "large slices": Table((3, 4, 5), (4, 8, 4), (64, 64)),
    "p beyond any block": Table((3, 700, 5), (2, 2, 2), (4, 4)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_shapes(shape: str, dtype: torch.dtype) -> None:
    call = random_call(
        [SHAPES[shape]], batch_size=60, longest_bag=30, dtype=dtype, weighted=True, pooling_mode=1
    )
    output_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    check_forward(call, output_dtype)
    check_gradients(call, random_grad(call, output_dtype))


def test_every_slice_of_every_core_is_reached() -> None:
    table = Table((37, 41, 3), (2, 2, 2), (3, 2))
    call = random_call([table], batch_size=table.rows)
    call.bags.indices = torch.randperm(table.rows)
    call.bags.offsets = torch.arange(table.rows + 1)
    check_forward(call, torch.float32)
    check_gradients(call, random_grad(call, torch.float32))


@pytest.mark.parametrize(
    "layout", ["transposed", "every other column", "expanded", "misaligned", "one value"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grad_output_of_any_strides(layout: str, dtype: torch.dtype) -> None:
    tables = [Table((5, 7, 3), (4, 2, 4), (8, 4)), Table((9, 4), (3, 5), (6,))]
    call = random_call(tables, features=[1, 0, 1], batch_size=6, weighted=True, pooling_mode=1)
    grad = random_grad(call, dtype)
    rows, columns = grad.shape
    if layout == "transposed":
        grad = grad.t().contiguous().t()
    elif layout == "every other column":
        grad = grad.repeat_interleave(2, dim=1)[:, ::2]
    elif layout == "expanded":
        grad = grad[:1].expand(rows, columns)
    elif layout == "misaligned":
        grad = torch.cat([grad.new_zeros(1), grad.flatten()])[1:].view(rows, columns)
    else:
        grad = grad.new_ones(()).expand(rows, columns)
    check_gradients(call, grad)


@pytest.mark.parametrize("mode", [reference.SUM, reference.MEAN])
def test_empty_bags_everywhere(mode: int) -> None:
    tables = [Table((5, 7, 3), (4, 2, 4), (8, 4)), Table((9, 4), (3, 5), (6,))]
    call = random_call(tables, features=[0, 1, 0], batch_size=7, pooling_mode=mode)
    lengths = torch.zeros(21, dtype=torch.int64)
    lengths[[2, 3, 13]] = torch.tensor([3, 1, 2])  # feature 2 has no lookup at all
    call.bags.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    call.bags.indices = torch.tensor([1, 1, 104, 0, 35, 8])
    check_forward(call, torch.float32)
    check_gradients(call, random_grad(call, torch.float32))


@pytest.mark.parametrize("batch_size", [0, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_no_lookups(batch_size: int, weighted: bool) -> None:
    tables = [Table((5, 7, 3), (4, 2, 4), (8, 4)), Table((9, 4), (3, 5), (6,))]
    call = random_call(tables, batch_size=batch_size, longest_bag=0, weighted=weighted)
    output = ops.tt_embedding_bag(call.cores, *call.bags.arguments(), torch.float32, False, False)
    assert torch.equal(output, torch.zeros(batch_size, 32 + 15))
    arguments = (torch.ones(batch_size, 47), call.cores, *call.bags.arguments())
    for core, grad in zip(call.cores, ops.tt_embedding_bag_backward(*arguments), strict=True):
        assert torch.equal(grad, torch.zeros_like(core))
    assert ops.tt_embedding_bag_weights_grad(*arguments).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_of_special_values(dtype: torch.dtype) -> None:
    """Subnormals, ties, overflow, infinities and NaN round as torch rounds them."""
    values = torch.tensor(
        [0.0, -0.0, 1.0, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 65504.0, 65519.0]
        + [65520.0, 1e5, 3.39e38, 6e-8, 2.9e-8, 6.1e-5, 1e-40, torch.inf, -torch.inf, torch.nan]
    )
    cores = [values.reshape(1, 1, -1, 1), torch.ones(1, 1, 1, 1)]
    call = (cores, torch.tensor([0]), torch.tensor([0, 1]), None, [2], [1], [0], 0)
    output = ops.tt_embedding_bag(*call, dtype, False, False)
    expected = values.to(dtype)[None]
    assert torch.equal(output.isnan(), expected.isnan())
    assert torch.equal(output.nan_to_num(), expected.nan_to_num())
    stored = [core.to(dtype) for core in cores]
    read = ops.tt_embedding_bag(stored, *call[1:], torch.float32, False, False)
    assert torch.equal(read.nan_to_num(), expected.float().nan_to_num())
