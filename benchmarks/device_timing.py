"""Times of calls on a GPU (or, by the wall clock, on the CPU).

On a GPU three ways, all with the calls queued behind a kernel that spins, so that the host plays
no part in them:

* ``events``: CUDA events around each call;
* ``graph``: each call captured in a CUDA graph of its own, events around each replay;
* ``chain``: all the calls in one graph, its time divided by their number: what is left without the
  fixed time of an event and of a graph's launch.

A call's times may depend on what the L2 cache holds: "warm" calls follow one another, each with
another index set; before a "cold" one a buffer larger than the cache is read, outside the events.
Reading it also writes back what the call before left modified in the cache, which "warm" calls pay
for: a call that writes much and rereads little may be the faster one when "cold".
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

_SPIN_CYCLES_PER_SECOND = 2e9  # at least the clock rate of today's cards
_LONGEST_SPIN_SECONDS = 4.0
_CALLS_PER_SPIN = 16  # few enough that their kernels fit into the launch queue
_LEAST_CALLS = 4  # of a measurement whose calls take long
_HOST_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Percentiles:
    """Of the repetitions of one measurement, in microseconds."""

    p10: float
    p50: float
    p90: float


def percentiles(times: Sequence[float]) -> Percentiles:
    """Deciles 1, 5 and 9."""
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return Percentiles(deciles[0], deciles[4], deciles[8])


def wall_times(calls: Sequence[Call], repetitions: int, synchronize: Call) -> list[float]:
    """Microseconds until each call returns, `synchronize` before every one."""
    times = []
    for i in range(repetitions):
        synchronize()
        start = time.perf_counter()
        calls[i % len(calls)]()
        times.append((time.perf_counter() - start) * 1e6)
    synchronize()
    return times


def host_time(calls: Sequence[Call], repetitions: int, synchronize: Call) -> float:
    """Microseconds of the host's until a call returns: the least of several rounds' medians.

    What else the host is doing meanwhile takes whole rounds longer, by up to twice, and none less.
    """
    rounds = [
        statistics.median(wall_times(calls, repetitions, synchronize)) for _ in range(_HOST_ROUNDS)
    ]
    return min(rounds)


def capture(groups: Sequence[Sequence[Call]]) -> list[torch.cuda.CUDAGraph]:
    """A CUDA graph of each group of calls, in a memory pool that they share: replay one at a time.

    The first call is made once before, for what it sets up.

    Raises:
        RuntimeError: a call cannot be captured.
    """
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graphs = []
    gc_was_enabled = gc.isenabled()
    gc.disable()  # a collection may free what must not be freed during a capture
    try:
        with torch.cuda.stream(stream):
            groups[0][0]()
            for group in groups:
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=pool)
                try:
                    for call in group:
                        call()
                finally:
                    graph.capture_end()
                graphs.append(graph)
    finally:
        if gc_was_enabled:
            gc.enable()
        torch.cuda.synchronize()
    return graphs


class CudaTimer:
    """Times calls on the current CUDA device.

    Args:
        repetitions: of each measurement.
        most_seconds: after which a measurement ends early, if it has a few repetitions.
    """

    def __init__(self, repetitions: int, most_seconds: float = 0.25) -> None:
        """Allocates the buffer that displaces the cache, and the events."""
        self.repetitions = repetitions
        self.most_seconds = most_seconds
        l2_bytes = torch.cuda.get_device_properties().L2_cache_size
        self._displacing = torch.zeros(l2_bytes, dtype=torch.float32, device="cuda")  # 4 x L2
        self._sum = torch.zeros((), device="cuda")
        self._events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(_CALLS_PER_SPIN)
        ]
        self._displace()
        for pair in self._events:
            for event in pair:
                event.record()  # the first record creates it
        torch.cuda.synchronize()

    def _displace(self) -> None:
        torch.sum(self._displacing, dim=0, out=self._sum)

    def queued(self, calls: Sequence[Call], host_us: float, cold: bool) -> list[float]:
        """Microseconds of each call by the device's clock.

        Args:
            calls: taken in turns.
            host_us: about what the host needs for a call.
            cold: displace the L2 cache before each.

        Raises:
            RuntimeError: the host does not queue the calls, because they wait for the device.
        """
        times: list[float] = []
        start_time = time.perf_counter()
        for call in calls:
            call()
        torch.cuda.synchronize()
        call_seconds = (time.perf_counter() - start_time) / len(calls)
        affordable = int(self.most_seconds / call_seconds)
        repetitions = max(_LEAST_CALLS, min(self.repetitions, affordable))
        events = self._events[: max(_LEAST_CALLS, min(_CALLS_PER_SPIN, affordable))]
        spin_seconds = 1e-3 + 2e-6 * (host_us + 30) * len(events)
        while len(times) < repetitions:
            spun = torch.cuda.Event()
            torch.cuda._sleep(int(spin_seconds * _SPIN_CYCLES_PER_SECOND))
            spun.record()
            for i, (start, end) in enumerate(events):
                if cold:
                    self._displace()
                start.record()
                calls[(len(times) + i) % len(calls)]()
                end.record()
            host_was_ahead = not spun.query()
            torch.cuda.synchronize()
            if host_was_ahead:
                times += [start.elapsed_time(end) * 1e3 for start, end in events]
            else:
                spin_seconds *= 2
                if spin_seconds > _LONGEST_SPIN_SECONDS:
                    raise RuntimeError("the call waits for the device, so it cannot be queued")
        return times

    def measure(
        self, calls: Sequence[Call], timings: Sequence[str], colds: Sequence[bool], host_us: float
    ) -> dict[tuple[str, bool], Percentiles]:
        """Percentiles by way of timing and state of the cache; ``chain`` is always warm.

        Raises:
            RuntimeError: see :meth:`queued` and :func:`capture`.
        """
        found = {}
        if "events" in timings:
            for cold in colds:
                found["events", cold] = percentiles(self.queued(calls, host_us, cold))
        if not {"graph", "chain"} & set(timings):
            return found
        *single, together = capture([*([call] for call in calls), calls])
        if "graph" in timings:
            replays = [graph.replay for graph in single]
            for cold in colds:
                found["graph", cold] = percentiles(self.queued(replays, 20, cold))
        if "chain" in timings and False in colds:
            times = self.queued([together.replay], 20 * len(single), False)
            found["chain", False] = percentiles([time_us / len(single) for time_us in times])
        return found


def smallest_kernel_times(timer: CudaTimer) -> dict[str, float]:
    """Median of a kernel on one element in each way: the part of a time that is not work."""
    scratch = torch.zeros(1, device="cuda")
    calls = [functools.partial(scratch.add_, 1) for _ in range(8)]
    measured = timer.measure(calls, ("events", "graph", "chain"), (False,), 10)
    return {timing: round(times.p50, 3) for (timing, _), times in measured.items()}
