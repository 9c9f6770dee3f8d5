"""Batches: what each rank sees, and that the KeyedJaggedTensors hold the right bags."""

from __future__ import annotations

import pytest
import torch

from torchrec_flowtt.config import ConfigError, DataConfig
from torchrec_flowtt.data import build_dataset, read_interactions
from torchrec_flowtt.data.batches import (
    EvaluationBatches,
    ExampleStore,
    RankShare,
    TrainingBatches,
)
from torchrec_flowtt.data.synthetic import write_random_ratings


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    path = tmp_path_factory.mktemp("ratings")
    write_random_ratings(path, ratings=500)
    return build_dataset(read_interactions(path, "synthetic"), DataConfig(cross_rows=64))


@pytest.fixture(scope="module")
def store(dataset):
    return ExampleStore(dataset)


def test_a_batch_holds_the_bags_of_its_examples(dataset, store):
    examples = torch.tensor([3, 499, 0, 3])
    batch = store.batch(examples)
    torch.testing.assert_close(batch.labels, torch.from_numpy(dataset.labels)[examples])
    torch.testing.assert_close(batch.dense_features, torch.from_numpy(dataset.dense)[examples])
    assert batch.sparse_features.keys() == [f.name for f in dataset.sparse]
    for feature in dataset.sparse:
        jagged = batch.sparse_features[feature.name].to_dense()
        for found, example in zip(jagged, examples.tolist(), strict=True):
            start, end = feature.offsets[example], feature.offsets[example + 1]
            assert found.tolist() == feature.values[start:end].tolist()


def seen(store, share, epoch=0, first_step=0, seed=1):
    """The dense features identify an example; here they stand for it."""
    batches = TrainingBatches(store, share, seed)
    return [batch.dense_features for batch in batches.epoch(epoch, first_step)]


def test_ranks_share_every_step_without_overlap(store):
    whole = seen(store, RankShare(40))
    halves = [seen(store, RankShare(40, rank, 2)) for rank in (0, 1)]
    assert len(whole) == len(halves[0]) == len(halves[1]) == len(store.splits["train"]) // 40
    for step, together in enumerate(whole):
        torch.testing.assert_close(torch.cat([half[step] for half in halves]), together)


def test_an_epoch_is_a_permutation_fixed_by_seed_and_epoch(store):
    def order(seed, epoch):
        return TrainingBatches(store, RankShare(40), seed).order(epoch).tolist()

    assert sorted(order(1, 0)) == list(store.splits["train"])
    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1) and order(1, 0) != order(2, 0)


def test_an_epoch_can_begin_at_any_step(store):
    whole = seen(store, RankShare(40, 1, 2), epoch=3)
    rest = seen(store, RankShare(40, 1, 2), epoch=3, first_step=4)
    assert len(rest) == len(whole) - 4
    for mine, theirs in zip(rest, whole[4:], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [6, 48, 600])
def test_evaluation_sees_every_example_once(dataset, store, world_size, batch_size):
    found = []
    steps = set()
    for rank in range(world_size):
        batches = EvaluationBatches(store, RankShare(batch_size, rank, world_size), "test")
        steps.add(batches.steps)
        for step, batch in enumerate(batches):
            assert len(batch.labels) == batch_size // world_size
            found += batch.dense_features[: batches.valid(step)].tolist()
    assert len(steps) == 1
    examples = dataset.splits["test"]
    assert sorted(found) == sorted(dataset.dense[examples.start : examples.stop].tolist())


def test_batch_sizes_that_do_not_fit(store):
    with pytest.raises(ConfigError, match="10 is not a multiple of the 3 processes"):
        RankShare(10, 0, 3)
    with pytest.raises(ConfigError, match="4096 is more than the 401 training examples"):
        TrainingBatches(store, RankShare(4096), 1)
