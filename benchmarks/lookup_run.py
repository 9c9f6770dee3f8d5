"""Runs contenders over workloads: what the lookup benchmarks have in common."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator, Sequence

import torch
from device_timing import CudaTimer, smallest_kernel_times
from environment import describe_run
from lookup_contenders import parameter_bytes, state_bytes
from lookup_floor import RATES, lookup_floor
from lookup_measurement import (
    Inputs,
    MemoryMeter,
    Plan,
    Record,
    WrongResultError,
    failed_record,
    measure_contender,
)
from lookup_modes import Mode
from lookup_records import describe_workload
from lookup_workloads import Distinct, Workload, count_distinct, draw_batch

_MEMORY_SHARE = 0.8  # of a card's, that a contender's parameters may take


class Runner:
    """Measures contenders on one device.

    Args:
        plan: what to measure.
        index_sets: batches that take turns.
        device: where.

    Attributes:
        failed: whether a contender was wrong or raised an error; one that does not fit into the
            device's memory, or that FBGEMM does not have there, has not failed.
    """

    def __init__(self, plan: Plan, index_sets: int, device: torch.device) -> None:
        """Allocates what the measurements need."""
        self.failed = False
        self._plan, self._index_sets, self._device = plan, index_sets, device
        self._memory = MemoryMeter()
        self._run = {**describe_run(), "device": str(device)}
        self._timer: CudaTimer | None = None
        if device.type == "cuda":
            self._timer = CudaTimer(plan.repetitions)
            warm_up_matmul(device)
            self._run["smallest_kernel_us"] = smallest_kernel_times(self._timer)
        gc.freeze()  # what is imported need not be searched for garbage after each contender

    def measure(self, workload: Workload, modes: Sequence[Mode]) -> Iterator[tuple[Mode, Record]]:
        """Complete records, except for ratios between them, with the mode each belongs to."""
        inputs, distinct = prepare_inputs(workload, modes, self._index_sets, self._device)
        common = {
            "shape": describe_workload(workload, distinct, self._index_sets),
            "run": self._run,
        }
        for mode in modes:
            start = time.perf_counter()
            for record in self._measure_mode(inputs, mode):
                yield mode, {**record, **common}
            seconds = time.perf_counter() - start
            print(f"{workload.name} {mode.key}: {seconds:.1f} s", file=sys.stderr, flush=True)

    def _measure_mode(self, inputs: Inputs, mode: Mode) -> Iterator[Record]:
        if reason := obstacle(inputs.workload, mode, self._device):
            yield failed_record(inputs.workload, mode, reason)
            return
        try:
            yield from measure_contender(inputs, mode, self._plan, self._timer, self._memory)
        except (WrongResultError, RuntimeError, NotImplementedError) as error:
            self.failed = True
            kind = "wrong" if isinstance(error, WrongResultError) else "failed"
            message = f"{kind}: {error}"
            print(f"{inputs.workload.name} {mode.key} {message}", file=sys.stderr, flush=True)
            yield failed_record(inputs.workload, mode, message)


def prepare_inputs(
    workload: Workload, modes: Sequence[Mode], index_sets: int, device: torch.device
) -> tuple[Inputs, Distinct]:
    """Draws the batches and counts what they share."""
    batches = [draw_batch(workload, seed, device) for seed in range(index_sets)]
    distinct = count_distinct(workload, batches)
    grad = torch.randn(workload.output_shape, device=device).to(workload.output_torch_dtype)
    rates = RATES.get(torch.cuda.get_device_name()) if device.type == "cuda" else None
    floors = {
        mode: lookup_floor(workload, distinct, mode.precision, mode.weights_dtype.itemsize, rates)
        for mode in modes
        if rates is not None and mode.is_tensor_train
    }
    return Inputs(workload, batches, grad, floors), distinct


def obstacle(workload: Workload, mode: Mode, device: torch.device) -> str:
    """Why the contender does not exist or does not fit here, or nothing."""
    if device.type != "cuda":
        lacking = mode.optimizer == "adam" and not mode.is_tensor_train
        return "FBGEMM has no Adam on the CPU" if lacking else ""
    available = int(torch.cuda.get_device_properties(device).total_memory * _MEMORY_SHARE)
    needed = parameter_bytes(workload, mode) + state_bytes(workload, mode)
    if needed <= available:
        return ""
    return f"{needed} bytes of tables and optimizer state, {available} can be had"


def warm_up_matmul(device: torch.device) -> None:
    """Has torch allocate its matrix products' workspace, which no contender shall answer for."""
    for dtype in (torch.float32, torch.float64):
        product = torch.ones(2, 64, 64, dtype=dtype, device=device, requires_grad=True)
        (product @ product).sum().backward()
