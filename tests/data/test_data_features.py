"""Features, labels and splits of made-up ratings."""

from __future__ import annotations

import numpy as np
import pytest

from torchrec_flowtt.config import DataConfig, DataError
from torchrec_flowtt.data import build_dataset, read_interactions
from torchrec_flowtt.data.features import (
    ACTIVITY_FEATURES,
    ITEM_RATING_FEATURES,
    USER_RATING_FEATURES,
    hash_rows,
    split_by_time,
)
from torchrec_flowtt.data.synthetic import write_random_ratings

CONFIG = DataConfig(history_length=5, cross_rows=101, rating_statistics="all")
DENSE_FEATURES = (*ACTIVITY_FEATURES, *USER_RATING_FEATURES, *ITEM_RATING_FEATURES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ratings")
    write_random_ratings(path, ratings=600)
    return path


@pytest.fixture(scope="module")
def interactions(folder):
    return read_interactions(folder, "synthetic")


@pytest.fixture(scope="module")
def dataset(interactions):
    return build_dataset(interactions, CONFIG)


def bag(dataset, name, example):
    feature = next(f for f in dataset.sparse if f.name == name)
    return feature.values[feature.offsets[example] : feature.offsets[example + 1]].tolist()


def test_tables_and_their_rows(dataset):
    rows = dataset.table_rows
    assert rows["user"] == 40 and rows["item"] == 60 and rows["recent_items"] == 60
    assert rows["cross_user_genre"] == rows["cross_occupation_age_item"] == 101
    for feature in dataset.sparse:
        assert feature.values.min() >= 0 and feature.values.max() < feature.num_embeddings
        assert len(feature.offsets) == 601


def test_bags_follow_from_the_files(interactions, dataset):
    values, offsets = interactions.genres
    for example in (0, 17, 599):
        item, user = interactions.item[example], interactions.user[example]
        assert bag(dataset, "item", example) == [item]
        genres = values[offsets[item] : offsets[item + 1]].tolist()
        assert bag(dataset, "genres", example) == genres
        assert len(bag(dataset, "cross_user_genre", example)) == len(genres)
        earlier = [
            interactions.item[j]
            for j in range(600)
            if interactions.user[j] == user
            and interactions.timestamp[j] < interactions.timestamp[example]
        ]
        assert bag(dataset, "recent_items", example) == earlier[-5:]


def test_labels_and_splits_by_time(interactions, dataset):
    np.testing.assert_array_equal(dataset.labels, interactions.rating >= 4)
    parts = [dataset.splits[name] for name in ("train", "validation", "test")]
    assert parts[0].start == 0 and parts[2].stop == 600
    time = interactions.timestamp
    for before, after in zip(parts, parts[1:], strict=False):
        assert before.stop == after.start
        assert time[before.stop - 1] < time[after.start]


def test_no_feature_depends_on_its_own_or_a_later_label(folder, interactions):
    """Change all ratings from one second on: earlier features and those of that second stay."""
    plain = build_dataset(interactions, CONFIG)
    cut = int(plain.splits["train"].stop * 0.6)
    second = interactions.timestamp[cut]
    later = interactions.timestamp >= second
    changed = np.where(later, 6 - interactions.rating, interactions.rating)
    other = build_dataset(type(interactions)(**{**vars(interactions), "rating": changed}), CONFIG)
    for mine, theirs in zip(plain.sparse, other.sparse, strict=True):
        np.testing.assert_array_equal(mine.values, theirs.values)
    # Standardisation uses the training split's mean, so compare what it cannot hide: the ranks.
    unchanged = interactions.timestamp <= second
    for column, name in enumerate(DENSE_FEATURES):
        before, after = plain.dense[unchanged, column], other.dense[unchanged, column]
        scale = np.std(before) / np.std(after) if np.std(after) else 1.0
        shifted = (after - after.mean()) * scale + before.mean()
        np.testing.assert_allclose(shifted, before, atol=1e-4, err_msg=name)
    last = interactions.timestamp > interactions.timestamp[int(600 * 0.9)]
    user_mean = DENSE_FEATURES.index("user_mean")
    assert not np.allclose(plain.dense[last, user_mean], other.dense[last, user_mean])


def test_dense_features_are_standardised_on_the_training_split(dataset):
    train = dataset.dense[: dataset.splits["train"].stop]
    np.testing.assert_allclose(train.mean(axis=0), 0.0, atol=1e-5)
    deviation = train.std(axis=0)
    assert ((abs(deviation - 1.0) < 1e-4) | (deviation == 0.0)).all()


@pytest.mark.parametrize(("statistics", "columns"), [("none", 7), ("user", 9), ("all", 12)])
def test_rating_statistics_can_be_left_out(interactions, dataset, statistics, columns):
    config = CONFIG.model_copy(update={"rating_statistics": statistics})
    dense = build_dataset(interactions, config).dense
    np.testing.assert_array_equal(dense, dataset.dense[:, :columns])


def test_hash_is_fixed_and_even():
    codes = np.arange(50_000)
    assert hash_rows(codes[:4], 2**20, 0).tolist() == hash_rows(codes, 2**20, 0)[:4].tolist()
    counts = np.bincount(hash_rows(codes, 100, 0), minlength=100)
    assert counts.min() > 400 and counts.max() < 600
    assert (hash_rows(codes, 2**20, 0) != hash_rows(codes, 2**20, 1)).mean() > 0.99
    # From the finaliser's definition, computed with Python's integers.
    z = (7 + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    assert hash_rows(np.array([7]), 10**6, 0).tolist() == [(z ^ (z >> 31)) % 10**6]


def test_equal_seconds_stay_on_one_side_of_a_cut():
    splits = split_by_time(
        np.array([0.0] * 5 + [1.0] * 7 + [2.0] * 4 + [3.0] * 4),
        DataConfig(validation_fraction=0.2, test_fraction=0.2),
    )
    assert splits == {"train": range(0, 12), "validation": range(12, 16), "test": range(16, 20)}


def test_too_little_data_for_three_splits():
    with pytest.raises(DataError, match="leave no example for the validation split"):
        split_by_time(np.zeros(10), DataConfig())
