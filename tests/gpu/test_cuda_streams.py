"""Streams, CUDA graphs and devices: the operators run where and when the caller says."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.gpu.calls import Call
from tests.gpu.expected import assert_matches, expect
from tests.gpu.shapes import TABLES
from tests.gpu.training import OPTIMIZERS, Training


def fixed_length_call(name: str, seed: int) -> Call:
    """Bags of one length, so that calls of different seeds have tensors of one shape."""
    group = TABLES[name]
    return group.call(
        batch_size=6,
        lengths=[3] * (6 * len(group.feature_table_map)),
        weighted=True,
        seed=seed,
        device="cuda",
    )


def run_all(call: Call, grad: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """Output, gradients of the cores and of the weights."""
    return call.forward(), call.backward(grad), call.weights_grad(grad)


def refill(call: Call, other: Call) -> None:
    """Copies the lookups of another call into the tensors of this one."""
    call.indices.copy_(other.indices)
    call.offsets.copy_(other.offsets)
    assert call.per_sample_weights is not None and other.per_sample_weights is not None
    call.per_sample_weights.copy_(other.per_sample_weights)


def test_side_stream() -> None:
    """The kernels queue on the current stream: they wait for a slow producer there."""
    call = fixed_length_call("different tables", seed=0)
    other = fixed_length_call("different tables", seed=1)
    expected = expect(dataclasses.replace(other, cores=call.cores))
    grad = call.grad_output()
    core_grads, weights_grad = expected.gradients(grad)
    run_all(call, grad)  # loads the kernels, which may synchronise
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
        refill(call, other)
        output, found, found_weights = run_all(call, grad)
    assert not stream.query(), "the operators waited for the device"
    stream.synchronize()
    assert_matches(output, expected.output)
    assert_matches(found_weights, weights_grad)
    for actual, wanted in zip(found, core_grads, strict=True):
        assert_matches(actual, wanted)


@pytest.mark.parametrize("name", ["different tables", "many tables", "global scratch"])
def test_graph_of_forward_and_backward(name: str) -> None:
    call = fixed_length_call(name, seed=0)
    grad = call.grad_output()
    run_all(call, grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, core_grads, weights_grad = run_all(call, grad)
    for seed in (1, 2):
        refill(call, fixed_length_call(name, seed))
        expected = expect(call)
        expected_cores, expected_weights = expected.gradients(grad)
        graph.replay()
        assert_matches(output, expected.output)
        assert_matches(weights_grad, expected_weights)
        for actual, wanted in zip(core_grads, expected_cores, strict=True):
            assert_matches(actual, wanted)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_graph_of_update(optimizer: str) -> None:
    """A replay sees new lookups, a new learning rate and the next iteration."""
    training = Training(fixed_length_call("features share tables", seed=0), optimizer)
    call = training.call
    grad = call.grad_output()
    Training(call.to("cuda"), optimizer).update(grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.update(grad)
    for seed, learning_rate in ((1, 0.1), (2, 0.02), (3, 0.3)):
        refill(call, fixed_length_call("features share tables", seed))
        training.learning_rate.fill_(learning_rate)
        expected = training.expected(grad)
        graph.replay()
        for states, wanted_states in zip(training.states(), expected, strict=True):
            for actual, wanted in zip(states, wanted_states, strict=True):
                assert_matches(actual, wanted, slack=10)
    assert training.iter.item() == 3


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device() -> None:
    """Tensors on cuda:1 while cuda:0 is current, which it stays."""
    assert torch.cuda.current_device() == 0
    call = fixed_length_call("global scratch", seed=0).to("cuda:1")
    expected = expect(call)
    grad = call.grad_output()
    core_grads, weights_grad = expected.gradients(grad)
    output = call.forward()
    assert output.device == torch.device("cuda:1")
    assert_matches(output, expected.output)
    assert_matches(call.weights_grad(grad), weights_grad)
    for actual, wanted in zip(call.backward(grad), core_grads, strict=True):
        assert actual.device == torch.device("cuda:1")
        assert_matches(actual, wanted)
    training = Training(call, "adam")
    wanted_states = training.expected(grad)
    training.update(grad)
    for actual, wanted in zip(call.cores, wanted_states[0], strict=True):
        assert_matches(actual, wanted, slack=10)
    assert torch.cuda.current_device() == 0
