"""Forward and deterministic backward passes, over calls, devices and orders drawn at random."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.cuda_on_cpu.emulated import Device, Order, forward, operators
from tests.cuda_on_cpu.tiled_tables import ONE_PRODUCT, THREE_PRODUCTS, assert_near
from tests.gpu.call_strategies import FEW, MANY, calls
from tests.gpu.calls import Call
from tests.gpu.expected import expect
from tests.tolerances import assert_close

MECHANISMS = ["fusion", "grouping", "folding", "sharing", "stealing", "checkpoints"]
# Of the one that is the output's; sums of 16-bit cores are rounded once.
ROUNDING = {torch.float32: 0.0, torch.float16: 1e-3, torch.bfloat16: 6e-3}

devices = st.builds(
    Device,
    multiprocessors=st.sampled_from([1, 2, 3, 6, 20]),
    capability_major=st.sampled_from([8, 9]),
    order=st.sampled_from(list(Order)),
    seed=st.integers(1, 99),
)


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    call=calls(*MANY, dtypes=(torch.float32, torch.float16, torch.bfloat16)),
    device=devices,
    output_dtype=st.sampled_from(list(ROUNDING)),
    disabled=st.one_of(st.just([]), st.lists(st.sampled_from(MECHANISMS), max_size=2)),
    allow_tf32=st.booleans(),
    deterministic=st.booleans(),
)
def test_forward(
    call: Call,
    device: Device,
    output_dtype: torch.dtype,
    disabled: list[str],
    allow_tf32: bool,
    deterministic: bool,
) -> None:
    assume(0 < call.indices.numel() <= 6000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWTT_CUDA_FORWARD", "tiled")
        patch.setenv("FLOWTT_CUDA_DISABLE", ", ".join(disabled))
        output = forward(call, device, output_dtype, allow_tf32, deterministic)
    one_product = allow_tf32 or (call.cores[0].dtype.itemsize == 2 and output_dtype.itemsize == 2)
    tolerance = 2 * (ONE_PRODUCT if one_product else THREE_PRODUCTS)
    assert_near(output, expect(call).output, tolerance + ROUNDING[output_dtype])


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    call=st.one_of(calls(*FEW), calls(st.just(40), st.just(3))), devices=st.tuples(devices, devices)
)
def test_deterministic_gradients(call: Call, devices: tuple[Device, Device]) -> None:
    grad = call.grad_output()
    found = [
        operators(device).tt_embedding_bag_backward(grad, *call.operands(), False, None, True)
        for device in devices
    ]
    terms = expect(dataclasses.replace(call, **magnitudes(call))).gradients(grad.abs())[0]
    right = expect(call).gradients(grad)[0]
    for first, second, expected, of_terms in zip(*found, right, terms, strict=True):
        assert torch.equal(first, second)
        assert_close(first, expected, "a core's gradient", slack=5.0, terms=of_terms)


def magnitudes(call: Call) -> dict[str, object]:
    """Tensors of a call whose gradients are the sums of the magnitudes of the terms."""
    weights = call.per_sample_weights
    return {
        "cores": [core.abs() for core in call.cores],
        "per_sample_weights": None if weights is None else weights.abs(),
    }
