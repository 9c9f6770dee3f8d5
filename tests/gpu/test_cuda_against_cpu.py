"""The CUDA kernels against the CPU kernels, over shapes drawn at random."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests import reference
from tests.gpu.call_strategies import MANY, calls
from tests.gpu.calls import Call
from tests.gpu.expected import assert_matches
from tests.gpu.training import OPTIMIZERS, STEP_SLACK, Training
from tests.tolerances import TOLERANCES

SETTINGS = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def assert_close_to_cpu(actual: Tensor, cpu: Call) -> None:
    """Errors relative to the sums of the terms' magnitudes: a sum of few columns may cancel."""
    expected = cpu.forward()
    cores, bags = reference.magnitudes(cpu.cores, cpu)
    magnitudes = dataclasses.replace(bags, cores=cores)
    assert actual.shape == expected.shape
    if actual.numel() == 0:
        return
    scale = magnitudes.forward().double().max().item()
    error = (actual.cpu().double() - expected.double()).abs().max().item()
    # On top of the rounding of both results.
    assert error <= TOLERANCES[expected.dtype].relative * 10 * scale


def assert_forward_close_to_cpu(cuda: Call, cpu: Call) -> None:
    for path in ("general", "tiled"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FLOWTT_CUDA_FORWARD", path)
            assert_close_to_cpu(cuda.forward(), cpu)


@SETTINGS
@given(calls())
def test_forward_and_gradients(cpu: Call) -> None:
    cuda = cpu.to("cuda")
    assert_forward_close_to_cpu(cuda, cpu)
    grad = cpu.grad_output()
    for actual, expected in zip(cuda.backward(grad.cuda()), cpu.backward(grad), strict=True):
        # Both are rounded to the cores' dtype, so they may differ by a unit in the last place.
        assert_matches(actual, expected, slack=2)
    assert_matches(cuda.weights_grad(grad.cuda()), cpu.weights_grad(grad))


@SETTINGS
@given(calls(*MANY))
def test_forward_of_many_lookups(cpu: Call) -> None:
    assert_forward_close_to_cpu(cpu.to("cuda"), cpu)


@SETTINGS
@given(calls(), st.sampled_from(OPTIMIZERS))
def test_update(cpu: Call, optimizer: str) -> None:
    cuda = cpu.to("cuda")
    trainings = [Training(cpu, optimizer), Training(cuda, optimizer)]
    for training in trainings:
        # After a step in half precision the cores may differ in the last place, and so may all
        # that follows from them.
        for seed in range(1 if cpu.cores[0].dtype.itemsize == 2 else 2):
            training.update(training.call.grad_output(seed=seed))
    for cpu_states, cuda_states in zip(*(t.states() for t in trainings), strict=True):
        for expected, actual in zip(cpu_states, cuda_states, strict=True):
            assert_matches(actual, expected, 2 * STEP_SLACK[actual.dtype])
