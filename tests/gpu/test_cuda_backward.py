"""Gradients of the cores and of the per-sample weights on CUDA against float64 autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.gpu.calls import MEAN, SUM, Call, Table, make_call
from tests.gpu.expected import assert_matches, expect
from tests.gpu.shapes import SMALL, TABLES


def assert_gradients_match(call: Call, grad: Tensor) -> None:
    core_grads, weights_grad = expect(call).gradients(grad)
    found = call.backward(grad)
    assert len(found) == len(call.cores)
    for actual, expected, core in zip(found, core_grads, call.cores, strict=True):
        assert actual.dtype == core.dtype and actual.is_contiguous()
        assert_matches(actual, expected)
    assert_matches(call.weights_grad(grad), weights_grad)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str
)
def test_tables(name: str, dtype: torch.dtype) -> None:
    group = TABLES[name]
    call = group.call(dtype=dtype, weighted=True, device="cuda")
    assert_gradients_match(call, call.grad_output())


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling_mode", [SUM, MEAN])
def test_pooling(name: str, weighted: bool, pooling_mode: int) -> None:
    group = TABLES[name]
    call = group.call(
        batch_size=9, max_length=7, weighted=weighted, pooling_mode=pooling_mode, device="cuda"
    )
    assert_gradients_match(call, call.grad_output())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gradient_dtypes(dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    call = make_call(TABLES["three cores"].tables, dtype=dtype, device="cuda")
    assert_gradients_match(call, call.grad_output(grad_dtype))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("offset_dtype", [torch.int32, torch.int64], ids=str)
def test_index_dtypes(index_dtype: torch.dtype, offset_dtype: torch.dtype) -> None:
    group = TABLES["features share tables"]
    call = group.call(
        index_dtype=index_dtype, offset_dtype=offset_dtype, pooling_mode=MEAN, device="cuda"
    )
    assert_gradients_match(call, call.grad_output())


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda grad: grad.t().contiguous().t(),
    "every second column": lambda grad: torch.repeat_interleave(grad, 2, 1)[:, ::2],
    "columns of a wider tensor": lambda grad: torch.cat([grad, grad, grad], 1)[
        :, grad.shape[1] : 2 * grad.shape[1]
    ],
    "one row expanded": lambda grad: grad[:1].expand_as(grad),
    "one value expanded": lambda grad: grad[:1, :1].expand_as(grad),
}


@pytest.mark.parametrize("layout", STRIDED)
def test_strided_gradients(layout: str) -> None:
    group = TABLES["different tables"]
    call = group.call(device="cuda")
    grad = STRIDED[layout](call.grad_output())
    assert not grad.is_contiguous()
    assert_gradients_match(call, grad)


@pytest.mark.parametrize("table", [Table((300, 2), (4, 4), (5,)), Table((2, 700), (2, 3), (7,))])
def test_every_slice_touched(table: Table) -> None:
    """More slices than a block has threads, each of them looked up."""
    call = make_call(
        [table], batch_size=2, lengths=[table.rows - 5, 5], ids=range(table.rows), device="cuda"
    )
    assert_gradients_match(call, call.grad_output())


def test_one_row_looked_up_many_times() -> None:
    """Every lookup adds to the same slices: heavy contention, and sums of 20,000 terms."""
    call = make_call(
        TABLES["three cores"].tables,
        batch_size=2000,
        lengths=[10] * 2000,
        ids=[17] * 20_000,
        weighted=True,
        device="cuda",
    )
    grad = call.grad_output()
    core_grads, _ = expect(call).gradients(grad)
    for actual, expected in zip(call.backward(grad), core_grads, strict=True):
        assert_matches(actual, expected, slack=10)


@pytest.mark.parametrize("batch_size", [0, 4])
def test_no_lookups(batch_size: int) -> None:
    group = TABLES["different tables"]
    call = make_call(
        group.tables, batch_size=batch_size, lengths=[0] * (3 * batch_size), device="cuda"
    )
    grad = call.grad_output()
    for core, core_grad in zip(call.cores, call.backward(grad), strict=True):
        assert torch.equal(core_grad, torch.zeros_like(core))
    assert call.weights_grad(grad).shape == (0,)


def test_ids_above_2_31() -> None:
    table = Table((2000, 2000, 2000), (2, 2, 2), (4, 4))
    ids = [table.rows - 1, 2**31 - 1, 2**31, 2**32, 2**32 + 12_345, 0]
    call = make_call([table], batch_size=3, lengths=[3, 0, 3], ids=ids, device="cuda")
    assert_gradients_match(call, call.grad_output())


def test_gradients_outlive_the_call() -> None:
    """The results own their memory: a later call must not change them."""
    call = make_call(TABLES["three cores"].tables, device="cuda")
    first = call.backward(call.grad_output(seed=1))
    kept = [grad.clone() for grad in first]
    call.backward(call.grad_output(seed=2))
    for grad, copy in zip(first, kept, strict=True):
        assert torch.equal(grad, copy)
