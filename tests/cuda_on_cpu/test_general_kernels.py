"""The general kernels, forward and backward, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.cuda_on_cpu.emulated import Device, Order, forward, operators, two_steps
from tests.gpu.calls import MEAN, NONE, SUM, Table, make_call
from tests.gpu.expected import assert_matches, expect
from tests.gpu.shapes import SMALL, TABLES, one

ORDERS = list(Order)
# Prefix products that do not fit into shared memory.
GLOBAL_SCRATCH = one((2, 2, 2), (16, 8, 4), (1024, 128))


@pytest.fixture(autouse=True)
def _general(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", "general")


@pytest.mark.parametrize("name", [name for name in SMALL if name != "many tables"])
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name.lower())
def test_forward_and_backward(name: str, order: Order) -> None:
    device = Device(multiprocessors=3, order=order)
    call = TABLES[name].call(weighted=True, pooling_mode=MEAN)
    expected = expect(call)
    assert_matches(forward(call, device), expected.output)
    grad = call.grad_output()
    cores, weights = expected.gradients(grad)
    actual = operators(device).tt_embedding_bag_backward(grad, *call.operands())
    for core, right in zip(actual, cores, strict=True):
        assert_matches(core, right)
    assert_matches(operators(device).tt_embedding_bag_weights_grad(grad, *call.operands()), weights)


def test_more_features_than_a_launch_takes() -> None:
    call = TABLES["many tables"].call(weighted=True, pooling_mode=MEAN)
    assert_matches(forward(call, Device(order=Order.RANDOM)), expect(call).output)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["three cores", "prime sizes", "different tables"])
def test_dtypes(dtype: torch.dtype, name: str) -> None:
    call = TABLES[name].call(dtype=dtype, weighted=True)
    output_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    expected = expect(call)
    assert_matches(forward(call, output_dtype=output_dtype), expected.output)
    grad = call.grad_output()
    actual = operators(Device()).tt_embedding_bag_backward(grad, *call.operands())
    for core, right in zip(actual, expected.gradients(grad)[0], strict=True):
        assert_matches(core, right)


@pytest.mark.parametrize("pooling_mode", [SUM, NONE])
@pytest.mark.parametrize("multiprocessors", [1, 200])
def test_devices_and_rows_without_pooling(pooling_mode: int, multiprocessors: int) -> None:
    call = make_call([Table((5, 6, 7), (2, 4, 4), (8, 3))], pooling_mode=pooling_mode)
    assert_matches(forward(call, Device(multiprocessors)), expect(call).output)


def test_scratch_in_global_memory() -> None:
    call = make_call(GLOBAL_SCRATCH.tables, batch_size=3, max_length=2, weighted=True)
    expected = expect(call)
    assert_matches(forward(call), expected.output)
    grad = call.grad_output()
    actual = operators(Device()).tt_embedding_bag_backward(grad, *call.operands())
    for core, right in zip(actual, expected.gradients(grad)[0], strict=True):
        assert_matches(core, right)


@pytest.mark.parametrize("optimizer", ["exact_sgd", "exact_row_wise_adagrad", "adam"])
@pytest.mark.parametrize("order", [Order.ASCENDING, Order.RANDOM], ids=["ascending", "random"])
def test_optimizer_steps(optimizer: str, order: Order) -> None:
    call = TABLES["different tables"].call(weighted=True)
    cores, expected = two_steps(call, Device(order=order), optimizer)[0]
    for core, right in zip(cores, expected, strict=True):
        assert_matches(core, right, slack=4)
