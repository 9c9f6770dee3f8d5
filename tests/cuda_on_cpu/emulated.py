"""The operators of the CUDA kernels on CPU tensors, and the device they think they run on."""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
from typing import Any

import torch
from torch import Tensor

from tests import reference
from tests.cuda_on_cpu import build
from tests.gpu.calls import Call
from torchrec_flowtt.ops.schemas import SCHEMAS


class Order(enum.IntEnum):
    """Which of the threads that can run comes next; names of grid.h."""

    ASCENDING = 0
    DESCENDING = 1
    RANDOM = 2
    BURSTS = 3


@dataclasses.dataclass(frozen=True)
class Device:
    """As in grid.h. Before compute capability 9 there is no programmatic dependent launch."""

    multiprocessors: int = 4
    capability_major: int = 9
    order: Order = Order.ASCENDING
    seed: int = 1


@functools.cache
def _library() -> ctypes.CDLL:
    for name, schema in SCHEMAS.items():
        torch.library.define(f"{build.NAMESPACE}::{name}", schema)
    path = build.library()
    torch.ops.load_library(path)
    library = ctypes.CDLL(str(path))
    library.cuda_on_cpu_set_device.argtypes = [ctypes.c_int] * 3 + [ctypes.c_uint64]
    library.cuda_on_cpu_set_device.restype = None
    return library


def operators(device: Device) -> Any:
    """``torch.ops.flowtt`` whose kernels are the CUDA ones, from now on on this device."""
    _library().cuda_on_cpu_set_device(*dataclasses.astuple(device))
    return getattr(torch.ops, build.NAMESPACE)


def forward(
    call: Call,
    device: Device | None = None,
    output_dtype: torch.dtype = torch.float32,
    allow_tf32: bool = False,
    deterministic: bool = False,
) -> Tensor:
    """``tt_embedding_bag`` of a call whose tensors are on the CPU."""
    return operators(device or Device()).tt_embedding_bag(
        *call.operands(), output_dtype, allow_tf32, deterministic
    )


def order_of(call: Call, device: Device) -> Tensor:
    """The order of the lookups, as the forward pass of a step keeps it."""
    return operators(device).tt_embedding_bag_with_order(
        *call.operands(), torch.float32, False, False
    )[1]


def two_steps(
    call: Call,
    device: Device,
    optimizer: str,
    with_order: bool = False,
    deterministic: bool = False,
    allow_tf32: bool = False,
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Steps the cores of a call twice: cores and both states, as they are and as they should be.

    The second step shows slices that were marked, or not, by mistake.
    """
    rule = reference.Optimizer(optimizer, learning_rate=0.1)
    momentum1, momentum2 = reference.optimizer_states(rule, call.cores)
    found = (call.cores, momentum1, momentum2)
    right = [[tensor.double() for tensor in state] for state in found]
    steps = torch.tensor(0)
    for iteration in (1, 2):
        grad = call.grad_output(seed=iteration)
        reference.step(rule, *right, call, grad, iteration)
        operators(device).tt_embedding_bag_backward_update(
            grad,
            *found,
            *call.arguments(),
            torch.tensor(rule.learning_rate),
            steps,
            rule.name,
            rule.eps,
            rule.beta1,
            rule.beta2,
            rule.weight_decay,
            allow_tf32,
            order_of(call, device) if with_order else None,
            False,
            deterministic,
        )
        assert steps.item() == iteration
    return list(zip(found, right, strict=True))
