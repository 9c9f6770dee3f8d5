"""TorchRec's train pipelines over TT and FBGEMM tables, FBGEMM's cached ones among them.

One process with a group of its own; needs TorchRec and FBGEMM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("torchrec")

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagConfig
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.train_pipeline.train_pipelines import (
    TrainPipelineSemiSync,
)
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from torchrec_flowtt.distributed import (
    FlowTTEmbeddingBagCollection,
    FlowTTEmbeddingBagCollectionSharder,
    FlowTTEmbeddingBagConfig,
)
from torchrec_flowtt.planner import FlowTTEmbeddingShardingPlanner

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FEATURES = ["wise", "parallel", "fused", "cached"]
KERNELS = {
    "wise": ("table_wise", "customized_kernel"),
    "parallel": ("data_parallel", "customized_kernel"),
    "fused": ("table_wise", "fused"),
    "cached": ("table_wise", "fused_uvm_caching"),
}
ROWS, DIM, BATCH = 5_000, 32, 64


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of one process."""
    store = tmp_path_factory.mktemp("group") / "store"
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    if DEVICE.type == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@dataclasses.dataclass
class Sample(Pipelineable):
    """One batch."""

    features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Sample:
        return Sample(
            self.features.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        self.features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Sample:
        return Sample(self.features.pin_memory(), self.labels.pin_memory())


class Click(nn.Module):
    """A collection, a dense layer and a loss."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            (FlowTTEmbeddingBagConfig if name in ("wise", "parallel") else EmbeddingBagConfig)(
                name=name,
                num_embeddings=ROWS,
                embedding_dim=DIM,
                feature_names=[name],
                **({"tt_ranks": (8, 8)} if name in ("wise", "parallel") else {}),
            )
            for name in FEATURES
        ]
        self.sparse = FlowTTEmbeddingBagCollection(tables=tables, device="meta")
        self.dense = nn.Linear(DIM * len(FEATURES), 1)

    def forward(self, sample: Sample) -> tuple[Tensor, Tensor]:
        pooled = self.sparse(sample.features)
        score = self.dense(torch.cat([pooled[name] for name in FEATURES], dim=1))
        loss = nn.functional.binary_cross_entropy_with_logits(score.squeeze(1), sample.labels)
        return loss, loss.detach()


def samples(steps: int) -> Iterator[Sample]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        lengths = torch.randint(0, 4, (len(FEATURES) * BATCH,), generator=generator)
        values = torch.randint(ROWS, (int(lengths.sum()),), generator=generator) ** 2 % ROWS
        features = KeyedJaggedTensor(keys=FEATURES, values=values, lengths=lengths)
        yield Sample(features, torch.randint(2, (BATCH,), generator=generator).float())


def sharded() -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The same model every time, with Adagrad everywhere."""
    cached = DEVICE.type == "cuda"
    constraints = {
        name: ParameterConstraints(
            sharding_types=[sharding],
            compute_kernels=[kernel if cached or name != "cached" else "fused"],
        )
        for name, (sharding, kernel) in KERNELS.items()
    }
    fused = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1, "eps": 1e-6}
    sharders = [FlowTTEmbeddingBagCollectionSharder(fused_params=fused), *get_default_sharders()]
    planner = FlowTTEmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device=DEVICE.type),
        batch_size=BATCH,
        constraints=constraints,
    )
    model = Click()
    plan = planner.collective_plan(model, sharders)
    for name, sharding in plan.plan["sparse"].items():
        assert [sharding.compute_kernel] == constraints[name].compute_kernels
    model = DistributedModelParallel(model, device=DEVICE, plan=plan, sharders=sharders)
    generator = torch.Generator().manual_seed(1)
    for _, value in sorted(model.state_dict().items()):
        tensor = value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
        with torch.no_grad():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.4)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    )
    return model, CombinedOptimizer([model.fused_optimizer, dense])


def plain(model: nn.Module, optimizer: CombinedOptimizer) -> list[float]:
    losses = []
    for sample in samples(6):
        optimizer.zero_grad()
        loss, detached = model(sample.to(DEVICE))
        loss.backward()
        optimizer.step()
        losses.append(detached.item())
    return losses


def piped(make: Callable[..., object]) -> Callable[..., list[float]]:
    def train(model: nn.Module, optimizer: CombinedOptimizer) -> list[float]:
        pipeline, iterator, losses = make(model, optimizer, DEVICE), samples(6), []
        while True:
            try:
                losses.append(pipeline.progress(iterator).item())
            except StopIteration:
                return losses

    return train


# SemiSync starts to look up ahead of the optimizer's step at its start_batch only.
PIPELINES = {
    "base": piped(TrainPipelineBase),
    "sparse_dist": piped(TrainPipelineSparseDist),
    "prefetch": piped(PrefetchTrainPipelineSparseDist),
    "semi_sync": piped(lambda *arguments: TrainPipelineSemiSync(*arguments, start_batch=100)),
}


@pytest.fixture(scope="module")
def expected(process_group: None) -> list[float]:
    return plain(*sharded())


@pytest.mark.parametrize("name", PIPELINES)
def test_losses_are_those_of_a_plain_loop(name: str, expected: list[float]) -> None:
    model, optimizer = sharded()
    losses = PIPELINES[name](model, optimizer)
    assert expected[-1] != pytest.approx(expected[0], rel=1e-3)
    assert losses == pytest.approx(expected, rel=1e-4)


def test_semi_sync_ahead_of_the_step_is_refused_for_data_parallel_tables() -> None:
    """The backward pass of a lookup needs the cores that it had."""
    model, optimizer = sharded()
    late = piped(lambda *arguments: TrainPipelineSemiSync(*arguments, start_batch=0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late(model, optimizer)
