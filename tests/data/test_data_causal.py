"""Statistics of the past against a loop that looks at every earlier event."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_flowtt.data.causal import EntityTimeline, ragged_positions, shrunken_mean

EVENTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(1, 5)), min_size=1, max_size=40
)


@settings(max_examples=200, deadline=None)
@given(events=EVENTS, length=st.integers(1, 4))
def test_every_statistic_sees_only_strictly_earlier_events(events, length):
    entity, time, value = (np.array(column) for column in zip(*events, strict=True))
    timeline = EntityTimeline.of(entity, time.astype(float))
    counts, sums = timeline.counts(), timeline.sums(value.astype(float))
    first, last = timeline.since_first(time.astype(float)), timeline.since_last(time.astype(float))
    recent, offsets = timeline.recent(value, length)
    for k in range(len(events)):
        # Python's sort is stable, as the timeline's: equal seconds keep their order.
        same = sorted(
            (j for j in range(len(events)) if entity[j] == entity[k]), key=lambda j: time[j]
        )
        past = [j for j in same if time[j] < time[k]]
        assert counts[k] == len(past)
        assert sums[k] == sum(value[j] for j in past)
        assert recent[offsets[k] : offsets[k + 1]].tolist() == [value[j] for j in past[-length:]]
        assert first[k] == (time[k] - time[past[0]] if past else 0)
        assert last[k] == (time[k] - time[past[-1]] if past else 0)


def test_ragged_positions():
    starts, lengths = np.array([7, 3, 0]), np.array([0, 2, 3])
    assert ragged_positions(starts, lengths).tolist() == [3, 4, 0, 1, 2]
    assert ragged_positions(np.array([], dtype=int), np.array([], dtype=int)).tolist() == []


def test_shrunken_mean_starts_at_the_prior():
    mean = shrunken_mean(np.array([0.0, 50.0]), np.array([0, 10]), np.array([3.0, 3.0]), 5.0)
    assert mean.tolist() == [3.0, pytest.approx(65 / 15)]
