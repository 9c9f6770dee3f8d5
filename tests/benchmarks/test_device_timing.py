"""How the lookup benchmarks take the host's time."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_a_busy_host_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    timing = importlib.import_module("device_timing")
    # Rounds of three calls; the second round alone is not disturbed, but for one call.
    rounds: Iterator[list[float]] = iter(
        [[9.0, 9.0, 9.0], [4.0, 90.0, 5.0], [8.0, 8.0, 8.0], [7.0, 6.0, 6.0], [9.0, 9.0, 9.0]]
    )
    monkeypatch.setattr(timing, "wall_times", lambda *_: next(rounds))
    assert timing.host_time([], 3, lambda: None) == 5.0
    assert list(rounds) == []


def test_every_call_is_made_in_turn_after_the_device_has_finished() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        timing = importlib.import_module("device_timing")
    made: list[str] = []
    calls = [lambda: made.append("a"), lambda: made.append("b")]
    times = timing.wall_times(calls, 3, lambda: made.append("wait"))
    assert made == ["wait", "a", "wait", "b", "wait", "a", "wait"]
    assert len(times) == 3 and min(times) >= 0.0
