"""Examples to batches: which examples each rank sees at each step, and their KeyedJaggedTensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_flowtt.config import ConfigError
from torchrec_flowtt.data.features import Dataset


@dataclass(frozen=True)
class RankShare:
    """Which part of every step's ``batch_size`` examples one rank takes.

    Attributes:
        batch_size: examples of a step over all ranks; a multiple of ``world_size``.
        rank: this process, from 0.
        world_size: processes.
    """

    batch_size: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        """Checks that the ranks share a step evenly.

        Raises:
            ConfigError: they do not.
        """
        if self.batch_size % self.world_size:
            raise ConfigError(
                f"train.batch_size {self.batch_size} is not a multiple of the"
                f" {self.world_size} processes that share it"
            )

    @property
    def local_batch_size(self) -> int:
        """Examples of a step on this rank."""
        return self.batch_size // self.world_size

    def start(self, step: int) -> int:
        """Where this rank's examples of a step begin in the order of examples."""
        return step * self.batch_size + self.rank * self.local_batch_size


class ExampleStore:
    """The dataset as tensors, from which batches of any examples are gathered."""

    def __init__(self, dataset: Dataset) -> None:
        """Concatenates the features' values, so that one gather serves all of them."""
        self.keys = [feature.name for feature in dataset.sparse]
        self.splits = dataset.splits
        self._dense = torch.from_numpy(dataset.dense)
        self._labels = torch.from_numpy(dataset.labels)
        bases = [0]
        for feature in dataset.sparse:
            bases.append(bases[-1] + len(feature.values))
        self._values = torch.cat([torch.from_numpy(f.values) for f in dataset.sparse])
        # [F, n + 1]: feature f's bag k is values[offsets[f, k]:offsets[f, k + 1]].
        self._offsets = torch.stack(
            [
                torch.from_numpy(f.offsets) + base
                for f, base in zip(dataset.sparse, bases, strict=False)
            ]
        )

    @property
    def num_dense(self) -> int:
        """Columns of the dense features."""
        return self._dense.shape[1]

    def labels(self, examples: torch.Tensor) -> torch.Tensor:
        """[B] float32 labels of the examples [B]."""
        return self._labels[examples]

    def batch(self, examples: torch.Tensor) -> Batch:
        """The examples [B] int64 as a TorchRec ``Batch``: dense [B, K], sparse [F * B bags]."""
        starts = self._offsets[:, examples].flatten()
        lengths = self._offsets[:, examples + 1].flatten() - starts
        ends = lengths.cumsum(0)
        total = int(ends[-1])
        shift = (starts - ends + lengths).repeat_interleave(lengths, output_size=total)
        values = self._values[torch.arange(total) + shift]
        sparse = KeyedJaggedTensor.from_lengths_sync(self.keys, values, lengths.to(torch.int32))
        return Batch(
            dense_features=self._dense[examples],
            sparse_features=sparse,
            labels=self._labels[examples],
        )


class TrainingBatches:
    """The training split, shuffled anew each epoch by ``(seed, epoch)`` alone.

    Every rank computes the same order and takes its share of each step, so all have the same number
    of steps and any step can be reached without the ones before it. The remainder that does not
    fill a step is left out of that epoch; it is another one each time.
    """

    def __init__(self, store: ExampleStore, share: RankShare, seed: int) -> None:
        """Raises ConfigError when the training split does not fill one step."""
        self._store = store
        self._share = share
        self._seed = seed
        self._examples = store.splits["train"]
        self.steps_per_epoch = len(self._examples) // share.batch_size
        if self.steps_per_epoch == 0:
            raise ConfigError(
                f"train.batch_size {share.batch_size} is more than the {len(self._examples)}"
                " training examples"
            )

    def order(self, epoch: int) -> torch.Tensor:
        """[n] int64, the examples of an epoch in the order in which they are visited."""
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
        permutation = torch.randperm(len(self._examples), generator=generator)
        return permutation + self._examples.start

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """This rank's batches of an epoch from ``first_step`` on."""
        order = self.order(epoch)
        for step in range(first_step, self.steps_per_epoch):
            start = self._share.start(step)
            yield self._store.batch(order[start : start + self._share.local_batch_size])


class EvaluationBatches:
    """A split in time order, every example exactly once over all ranks.

    Ranks must take the same number of steps and a step must not be empty, so the last step is
    filled up with repetitions of the first example; :meth:`valid` says how many are real.
    """

    def __init__(self, store: ExampleStore, share: RankShare, split: str) -> None:
        """``split`` is ``train``, ``validation`` or ``test``."""
        self._store = store
        self._share = share
        self._examples = store.splits[split]
        self.steps = -(-len(self._examples) // share.batch_size)

    def __len__(self) -> int:
        """Examples of the split."""
        return len(self._examples)

    def valid(self, step: int) -> int:
        """How many of this rank's examples of a step are not repetitions."""
        left = len(self._examples) - self._share.start(step)
        return min(max(left, 0), self._share.local_batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """This rank's batches, all of the same size."""
        first = self._examples.start
        for step in range(self.steps):
            start = first + self._share.start(step)
            examples = torch.arange(start, start + self._share.local_batch_size)
            yield self._store.batch(examples.where(examples < self._examples.stop, first))
