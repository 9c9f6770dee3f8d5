"""One contender on one workload: checked, then timed, phase by phase."""

from __future__ import annotations

import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Sequence

import torch
from device_timing import CudaTimer, Percentiles, host_time, percentiles, wall_times
from lookup_contenders import Contender, build, parameter_bytes
from lookup_correctness import (
    forward_error,
    output_limit,
    repeats_exactly,
    replay_error,
    step_error,
)
from lookup_floor import Floor
from lookup_modes import PHASES, Mode
from lookup_workloads import Batch, Workload
from torch import Tensor

Record = dict[str, object]

_NO_TIMES = {"p10_us": None, "p50_us": None, "p90_us": None}


class WrongResultError(Exception):
    """A contender computes something else than it should; its times mean nothing."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        phases: "forward", "training": forward, backward and an optimizer step.
        timings: "events", "graph", "chain" (see `device_timing`); on the CPU it is "wall".
        colds: states of the L2 cache: False is warm.
        repetitions: of every measurement.
        sampled_lookups: of each table and batch, about, that are compared with float64.
    """

    phases: Sequence[str] = PHASES
    timings: Sequence[str] = ("events", "graph", "chain")
    colds: Sequence[bool] = (False, True)
    repetitions: int = 64
    sampled_lookups: int = 8192


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What all contenders of a workload get: batches that take turns, and a gradient.

    Attributes:
        workload: tables and lookups.
        batches: on the device.
        grad: of the output, ``[B, T * D]``.
        floors: of the modes for which one is known.
    """

    workload: Workload
    batches: list[Batch]
    grad: Tensor
    floors: dict[Mode, Floor]


class MemoryMeter:
    """Device memory above parameters, inputs and output.

    What a contender leaves allocated when it is gone (a workspace kept for the next one) is added
    to its later figures too.
    """

    def __init__(self) -> None:
        """Starts with nothing left by anyone."""
        self._left: dict[str, int] = {}
        self._contender = ""
        self._empty = self._built = 0

    def before_building(self, contender: str) -> None:
        """Before the parameters are allocated, and after the inputs are."""
        self._contender, self._empty = contender, torch.cuda.memory_allocated()

    def after_building(self) -> None:
        """Before the first call."""
        self._built = torch.cuda.memory_allocated()

    def peak(self, call: Callable[[], Tensor]) -> int:
        """Bytes at the highest point of a call that returns its output."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        output_bytes = call().nbytes
        torch.cuda.synchronize()
        above = torch.cuda.max_memory_allocated() - self._built - output_bytes
        return max(0, above) + self._left.get(self._contender, 0)

    def after_destroying(self) -> None:
        """When the parameters are gone."""
        left = max(0, torch.cuda.memory_allocated() - self._empty)
        self._left[self._contender] = self._left.get(self._contender, 0) + left


def measure_contender(
    inputs: Inputs, mode: Mode, plan: Plan, timer: CudaTimer | None, memory: MemoryMeter
) -> Iterator[Record]:
    """Records of all phases, ways of timing and cache states.

    Raises:
        WrongResultError: the output or the step is wrong; what follows is not measured.
    """
    device = inputs.grad.device
    if device.type == "cuda":
        memory.before_building(mode.contender)
    with mode.settings():
        contender = build(inputs.workload, mode, device)
        if device.type == "cuda":
            memory.after_building()
        for phase in plan.phases:
            if phase not in mode.phases:
                continue
            yield from _measure_phase(contender, inputs, mode, phase, plan, timer, memory)
    del contender
    gc.collect()
    if device.type == "cuda":
        memory.after_destroying()


def _forward(contender: Contender, batch: Batch) -> Tensor:
    with torch.no_grad():
        return contender(batch)


def _training_step(contender: Contender, batch: Batch, grad: Tensor) -> Tensor:
    output = contender(batch)
    output.backward(grad)
    return output.detach()


def _error(contender: Contender, inputs: Inputs, mode: Mode, phase: str, plan: Plan) -> float:
    """Relative error of the phase's result, within its limit."""
    if phase == "forward":
        limit = output_limit(inputs.workload, mode.forward_limit)
        error = forward_error(contender, inputs.workload, inputs.batches, plan.sampled_lookups)
        if mode.repeats_exactly and not repeats_exactly(contender, inputs.batches):
            name = inputs.workload.name
            raise WrongResultError(f"{mode.key} on {name}: {phase} differs from run to run")
    else:
        limit = mode.step_limit
        error = step_error(contender, inputs.batches[0], inputs.grad, mode.optimizer)
    _refuse_above(limit, error, inputs, mode, phase)
    return error


def _refuse_above(limit: float, error: float, inputs: Inputs, mode: Mode, what: str) -> None:
    if not error <= limit:
        raise WrongResultError(
            f"{mode.key} on {inputs.workload.name}: {what} has a relative error of {error:.2e}, "
            f"at most {limit:.0e} is right"
        )


def _measure_phase(
    contender: Contender,
    inputs: Inputs,
    mode: Mode,
    phase: str,
    plan: Plan,
    timer: CudaTimer | None,
    memory: MemoryMeter,
) -> Iterator[Record]:
    # Outputs are dropped at once, so that a call does not hold two of them.
    if phase == "forward":
        calls = [functools.partial(_forward, contender, batch) for batch in inputs.batches]
    else:
        calls = [
            functools.partial(_training_step, contender, batch, inputs.grad)
            for batch in inputs.batches
        ]
    # First, as the check of a step starts from fresh optimizer state.
    error = _error(contender, inputs, mode, phase, plan)
    floor = inputs.floors.get(mode)
    record: Record = {
        "workload": inputs.workload.name,
        "contender": mode.contender,
        "precision": mode.precision,
        "optimizer": mode.optimizer,
        "phase": phase,
        "parameter_bytes": parameter_bytes(inputs.workload, mode),
        "peak_bytes_above_parameters": None if timer is None else memory.peak(calls[0]),
        "relative_error": error,
        "floor": None if floor is None else dataclasses.asdict(floor),
        "floor_us": floor and round(getattr(floor, f"{phase}_us"), 3),
        "failure": None,
    }
    if timer is None:
        times = percentiles(wall_times(calls, plan.repetitions, lambda: None))
        yield {**record, "timing": "wall", "cold": False, "host_us": None, **_rounded(times)}
        return
    wall_times(calls, len(calls), torch.cuda.synchronize)
    host_us = host_time(calls, plan.repetitions, torch.cuda.synchronize)
    record["host_us"] = round(host_us, 3)
    for ways in (("events",), ("graph", "chain")):
        timings = [timing for timing in plan.timings if timing in ways]
        try:
            if phase == "forward" and {"graph", "chain"} & set(timings):
                replayed = replay_error(
                    contender, inputs.workload, inputs.batches, plan.sampled_lookups
                )
                limit = output_limit(inputs.workload, mode.forward_limit)
                _refuse_above(limit, replayed, inputs, mode, "forward in a CUDA graph")
            measured = timer.measure(calls, timings, plan.colds, host_us)
        except RuntimeError as error:  # it waits for the device, or cannot be captured
            for timing in timings:
                yield {**record, "timing": timing, "cold": None, **_NO_TIMES, "failure": str(error)}
            continue
        for (timing, cold), times in measured.items():
            yield {**record, "timing": timing, "cold": cold, **_rounded(times)}


def failed_record(workload: Workload, mode: Mode, failure: str) -> Record:
    """In place of the measurements of a contender that cannot be measured or trusted."""
    return {
        "workload": workload.name,
        "contender": mode.contender,
        "precision": mode.precision,
        "optimizer": mode.optimizer,
        "phase": None,
        "parameter_bytes": parameter_bytes(workload, mode),
        "peak_bytes_above_parameters": None,
        "relative_error": None,
        "floor": None,
        "floor_us": None,
        "host_us": None,
        "timing": None,
        "cold": None,
        **_NO_TIMES,
        "failure": failure,
    }


def _rounded(times: Percentiles) -> dict[str, float]:
    return {f"{name}_us": round(value, 3) for name, value in dataclasses.asdict(times).items()}
