"""Statistics of an entity's past at the moment of each of its events.

"Past" is strict: events of the same second are not seen, because in MovieLens a user often rates
several films in one second and none of them was known when the others were given. No statistic
therefore depends on the label it is meant to help predict, nor on anything later.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]


def ragged_positions(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """Concatenates the ranges ``starts[k] .. starts[k] + lengths[k] - 1``.

    >>> ragged_positions(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)


@dataclass(frozen=True)
class EntityTimeline:
    """The events of every entity in time order, with where each event's past begins and ends.

    Attributes:
        order: [n] events sorted by entity, then time, then position.
        first: [n], per event, the position in ``order`` of its entity's first event.
        past_end: [n], per event, the position in ``order`` just after the last event of its entity
            with a smaller timestamp; ``past_end - first`` events are its past.
    """

    order: Int64Array
    first: Int64Array
    past_end: Int64Array

    @classmethod
    def of(cls, entity: Int64Array, timestamp: Float64Array) -> EntityTimeline:
        """Sorts n events, given the entity and the timestamp [n] of each."""
        n = len(entity)
        order = np.lexsort((np.arange(n), timestamp, entity))
        position = np.arange(n)
        new_entity = np.ones(n, dtype=bool)
        new_entity[1:] = entity[order][1:] != entity[order][:-1]
        new_second = new_entity.copy()
        new_second[1:] |= timestamp[order][1:] != timestamp[order][:-1]
        first = np.empty(n, dtype=np.int64)
        past_end = np.empty(n, dtype=np.int64)
        first[order] = np.maximum.accumulate(np.where(new_entity, position, 0))
        past_end[order] = np.maximum.accumulate(np.where(new_second, position, 0))
        return cls(order, first, past_end)

    def counts(self) -> Int64Array:
        """[n]: how many events the entity had before each event."""
        return self.past_end - self.first

    def sums(self, values: Float64Array) -> Float64Array:
        """[n]: the sum of ``values`` [n] over the past of each event."""
        running = np.concatenate([[0.0], np.cumsum(values[self.order])])
        past: Float64Array = running[self.past_end] - running[self.first]
        return past

    def since_first(self, timestamp: Float64Array) -> Float64Array:
        """[n]: seconds since the entity's first event, 0 for an event without a past."""
        elapsed: Float64Array = timestamp - timestamp[self.order][self.first]
        return elapsed

    def since_last(self, timestamp: Float64Array) -> Float64Array:
        """[n]: seconds since the entity's previous second with an event, 0 without a past."""
        previous = timestamp[self.order][np.maximum(self.past_end - 1, 0)]
        return np.where(self.counts() > 0, timestamp - previous, 0.0)

    def recent(self, values: Int64Array, length: int) -> tuple[Int64Array, Int64Array]:
        """The ``values`` of the last ``length`` past events, oldest first, as values and offsets.

        Returns:
            values int64 and offsets int64 [n + 1]; an event without a past has an empty bag.
        """
        starts = np.maximum(self.first, self.past_end - length)
        lengths = self.past_end - starts
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        return values[self.order][ragged_positions(starts, lengths)], offsets


def shrunken_mean(
    sums: Float64Array, counts: Int64Array, prior: Float64Array, strength: float
) -> Float64Array:
    """A mean drawn towards ``prior`` as if ``strength`` more events had had exactly that value."""
    return (sums + strength * prior) / (counts + strength)
