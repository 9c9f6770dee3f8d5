"""Interactions to model inputs: sparse features, dense features and labels, and the split by time.

docs/data.md lists every feature. All that depends on other interactions is causal: see
:mod:`torchrec_flowtt.data.causal`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_flowtt.config import DataConfig, DataError
from torchrec_flowtt.data.causal import EntityTimeline, ragged_positions, shrunken_mean
from torchrec_flowtt.data.parsing import Interactions

Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

MAX_AGE = 100
AGE_GROUP_STARTS = (18, 25, 35, 45, 50, 56)
PRIOR_STRENGTH = 5.0
SCALE_MIDDLE = 3.0
SECONDS_PER_DAY = 86_400.0
SECONDS_PER_YEAR = 365.25 * SECONDS_PER_DAY

ACTIVITY_FEATURES = (
    "user_count",
    "item_count",
    "seconds_since_user_rated",
    "days_since_item_first_rated",
    "years_since_release",
    "hour_sin",
    "hour_cos",
)
USER_RATING_FEATURES = ("user_mean", "user_positive_rate")
ITEM_RATING_FEATURES = ("item_mean", "item_positive_rate", "user_genre_mean")


@dataclass(frozen=True)
class SparseFeature:
    """One sparse feature and the table of the same name that it looks up.

    Attributes:
        name: of feature and table.
        num_embeddings: rows of the table; every value is in ``[0, num_embeddings)``.
        values: int64, bag after bag.
        offsets: [n + 1] int64; bag k is ``values[offsets[k]:offsets[k + 1]]``.
    """

    name: str
    num_embeddings: int
    values: Int64Array
    offsets: Int64Array


@dataclass(frozen=True)
class Dataset:
    """All examples in time order.

    Attributes:
        sparse: the sparse features.
        dense: [n, K] float32, standardised with the training split's mean and deviation.
        labels: [n] float32, 1 where the rating is at least ``data.positive_rating``.
        splits: ``train``, ``validation`` and ``test`` as ranges of example numbers.
    """

    sparse: tuple[SparseFeature, ...]
    dense: Float32Array
    labels: Float32Array
    splits: dict[str, range]

    @property
    def table_rows(self) -> dict[str, int]:
        """Rows of every table."""
        return {feature.name: feature.num_embeddings for feature in self.sparse}


def hash_rows(codes: Int64Array, rows: int, salt: int) -> Int64Array:
    """Spreads codes over ``rows`` rows with the splitmix64 finaliser, the same on every machine.

    Args:
        codes: [m] int64, not negative.
        rows: size of the hash space, at least 1.
        salt: makes two crosses hash differently.

    Returns:
        [m] int64 in ``[0, rows)``. Source: Steele, Lea and Flood, "Fast splittable pseudorandom
        number generators", OOPSLA 2014.
    """
    # A shape of at least one axis: numpy warns on overflow of scalars, not of arrays.
    z = codes.astype(np.uint64) + np.uint64((salt + 1) * 0x9E3779B97F4A7C15 & (2**64 - 1))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return (z % np.uint64(rows)).astype(np.int64)


def build_dataset(interactions: Interactions, config: DataConfig) -> Dataset:
    """Computes every feature of every interaction.

    Raises:
        DataError: too few interactions, or too few different seconds, for three splits, or a
            split with one kind of label only.
    """
    labels = (interactions.rating >= config.positive_rating).astype(np.float64)
    splits = split_by_time(interactions.timestamp, config)
    for name, examples in splits.items():
        if (
            labels[examples.start : examples.stop].min()
            == labels[examples.start : examples.stop].max()
        ):
            kind = "positive" if labels[examples.start] else "negative"
            raise DataError(
                f"all {len(examples)} examples of the {name} split are {kind}, so there is no AUC;"
                " set another data.positive_rating, other fractions, or give more data"
            )
    by_user = EntityTimeline.of(interactions.user, interactions.timestamp)
    sparse = _sparse_features(interactions, by_user, config)
    by_item = EntityTimeline.of(interactions.item, interactions.timestamp)
    columns = _activity_features(interactions, by_user, by_item)
    names = list(ACTIVITY_FEATURES)
    if config.rating_statistics != "none":
        columns.update(_rating_features(interactions, by_user, by_item, labels))
        names += USER_RATING_FEATURES
    if config.rating_statistics == "all":
        names += ITEM_RATING_FEATURES
    dense = np.stack([columns[name] for name in names], axis=1)
    train = dense[splits["train"].start : splits["train"].stop]
    deviation = train.std(axis=0)
    dense = (dense - train.mean(axis=0)) / np.where(deviation > 0.0, deviation, 1.0)
    return Dataset(sparse, dense.astype(np.float32), labels.astype(np.float32), splits)


def split_by_time(timestamp: Float64Array, config: DataConfig) -> dict[str, range]:
    """Cuts n sorted timestamps into three ranges; equal timestamps stay on one side of a cut.

    Raises:
        DataError: one of the three would be empty.
    """
    n = len(timestamp)
    cuts = []
    for rest in (config.validation_fraction + config.test_fraction, config.test_fraction):
        wanted = min(max(round(n * (1.0 - rest)), 1), n) - 1
        cuts.append(int(np.searchsorted(timestamp, timestamp[wanted], side="right")))
    bounds = [0, *cuts, n]
    splits = {
        name: range(bounds[k], bounds[k + 1])
        for k, name in enumerate(("train", "validation", "test"))
    }
    for name, examples in splits.items():
        if not examples:
            raise DataError(
                f"{n} interactions leave no example for the {name} split; give more data or other"
                " data.validation_fraction and data.test_fraction"
            )
    return splits


def _singles(name: str, rows: int, values: Int64Array) -> SparseFeature:
    return SparseFeature(name, rows, values, np.arange(len(values) + 1, dtype=np.int64))


def _genre_bags(interactions: Interactions) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Genre values, offsets [n + 1], and the interaction that each value belongs to."""
    values, offsets = interactions.genres
    starts = offsets[interactions.item]
    lengths = offsets[interactions.item + 1] - starts
    bag_offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return values[ragged_positions(starts, lengths)], bag_offsets, owner


def _sparse_features(
    interactions: Interactions, by_user: EntityTimeline, config: DataConfig
) -> tuple[SparseFeature, ...]:
    user, item = interactions.user, interactions.item
    vocabulary = interactions.vocabulary
    occupation = interactions.occupation[user]
    years = np.clip(interactions.age, 0, MAX_AGE - 1).astype(np.int64)[user]
    age_group = np.searchsorted(np.array(AGE_GROUP_STARTS), years, side="right").astype(np.int64)
    genre, genre_offsets, owner = _genre_bags(interactions)
    num_genres = max(len(vocabulary["genre"]), 1)
    user_genre = user[owner] * num_genres + genre
    groups = len(AGE_GROUP_STARTS) + 1
    occupation_age_item = (occupation * groups + age_group) * interactions.num_items + item
    recent, recent_offsets = by_user.recent(item, config.history_length)
    rows = config.cross_rows
    return (
        _singles("user", interactions.num_users, user),
        _singles("item", interactions.num_items, item),
        _singles("age", MAX_AGE, years),
        _singles("gender", len(vocabulary["gender"]), interactions.gender[user]),
        _singles("occupation", len(vocabulary["occupation"]), occupation),
        _singles("zip_prefix", len(vocabulary["zip_prefix"]), interactions.zip_prefix[user]),
        SparseFeature("genres", num_genres, genre, genre_offsets),
        SparseFeature("recent_items", interactions.num_items, recent, recent_offsets),
        SparseFeature("cross_user_genre", rows, hash_rows(user_genre, rows, 0), genre_offsets),
        _singles("cross_occupation_age_item", rows, hash_rows(occupation_age_item, rows, 1)),
    )


def _activity_features(
    interactions: Interactions, by_user: EntityTimeline, by_item: EntityTimeline
) -> dict[str, Float64Array]:
    time = interactions.timestamp
    angle = 2.0 * np.pi * (time % SECONDS_PER_DAY) / SECONDS_PER_DAY
    years = 1970.0 + time / SECONDS_PER_YEAR - interactions.release_year[interactions.item]
    return {
        "user_count": np.log1p(by_user.counts()),
        "item_count": np.log1p(by_item.counts()),
        "seconds_since_user_rated": np.log1p(by_user.since_last(time)),
        "days_since_item_first_rated": by_item.since_first(time) / SECONDS_PER_DAY,
        "years_since_release": np.log1p(np.maximum(years, 0.0)),
        "hour_sin": np.sin(angle),
        "hour_cos": np.cos(angle),
    }


def _rating_features(
    interactions: Interactions,
    by_user: EntityTimeline,
    by_item: EntityTimeline,
    labels: Float64Array,
) -> dict[str, Float64Array]:
    """Means of earlier ratings and labels, above what all users gave all items until then."""
    time, rating = interactions.timestamp, interactions.rating
    everything = EntityTimeline.of(np.zeros_like(interactions.item), time)
    seen = everything.counts()
    middle = np.full(len(time), SCALE_MIDDLE)
    prior = shrunken_mean(everything.sums(rating), seen, middle, PRIOR_STRENGTH)
    half = np.full(len(time), 0.5)
    positive = shrunken_mean(everything.sums(labels), seen, half, PRIOR_STRENGTH)

    def above(timeline: EntityTimeline, values: Float64Array, base: Float64Array) -> Float64Array:
        mean = shrunken_mean(timeline.sums(values), timeline.counts(), base, PRIOR_STRENGTH)
        return mean - base

    genre, offsets, owner = _genre_bags(interactions)
    num_genres = max(len(interactions.vocabulary["genre"]), 1)
    by_user_genre = EntityTimeline.of(interactions.user[owner] * num_genres + genre, time[owner])
    genre_above = above(by_user_genre, rating[owner], prior[owner])
    genre_sum = np.bincount(owner, weights=genre_above, minlength=len(time))
    return {
        "user_mean": above(by_user, rating, prior),
        "item_mean": above(by_item, rating, prior),
        "user_genre_mean": genre_sum / np.maximum(np.diff(offsets), 1),
        "user_positive_rate": above(by_user, labels, positive),
        "item_positive_rate": above(by_item, labels, positive),
    }
