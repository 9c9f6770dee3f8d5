"""Checks of the user's whole path; run by test_end_to_end.py."""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from tests.distributed.ranks_training import compare_state, whole
from tests.distributed.sharded_models import (
    ADAGRAD,
    TABLES,
    Model,
    Reference,
    Table,
    batch,
    dense_parameters,
    plan_for,
    shard,
    sharders,
    target,
    topology,
    unsharded,
)
from tests.distributed.torchrun_launcher import REPOSITORY, run_on_rank
from torchrec_flowtt.distributed import (
    FlowTTEmbeddingBagCollection,
    FlowTTEmbeddingBagCollectionSharder,
    FlowTTEmbeddingBagConfig,
)
from torchrec_flowtt.distributed.sharding_view import ShardingView
from torchrec_flowtt.planner import FlowTTEmbeddingShardingPlanner

FEATURES = [feature for table in TABLES for feature in table.features]


class Click(nn.Module):
    """A collection, a dense layer, and a loss, as pipelines run them."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = unsharded().sparse
        columns = sum(table.dim * len(table.features) for table in TABLES)
        self.dense = nn.Linear(columns, 1)

    def forward(self, sample: Sample) -> tuple[Tensor, Tensor]:
        pooled = self.sparse(sample.features)
        score = self.dense(torch.cat([pooled[name] for name in FEATURES], dim=1))
        loss = nn.functional.binary_cross_entropy_with_logits(score.squeeze(1), sample.labels)
        return loss, loss.detach()


@dataclasses.dataclass
class Sample(Pipelineable):
    features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Sample:
        return Sample(self.features.to(device), self.labels.to(device))

    def record_stream(self, stream) -> None:
        self.features.record_stream(stream)

    def pin_memory(self) -> Sample:
        return self


def samples(steps: int) -> Iterator[Sample]:
    for step in range(steps):
        features = batch(TABLES, dist.get_rank(), step)
        yield Sample(features, (torch.arange(features.stride()) + step).remainder(2).float())


def planned(model: nn.Module) -> tuple[DistributedModelParallel, FlowTTEmbeddingShardingPlanner]:
    planner = FlowTTEmbeddingShardingPlanner(topology=topology(), batch_size=6)
    plan = planner.collective_plan(model, sharders(), dist.GroupMember.WORLD)
    rows = planner.placement_rows(plan)
    assert {row.table for row in rows} == {table.name for table in TABLES}
    assert all(row.kernel == "flowtt" for row in rows if row.table.startswith("tt"))
    return DistributedModelParallel(model, plan=plan, sharders=sharders()), planner


def train(pipelined: bool) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(3)
    model, _ = planned(Click())
    # Planned table-wise tables draw other numbers on other ranks; start from one set of weights.
    generator = torch.Generator().manual_seed(1)
    start = {}
    for name, parameter in Click().state_dict().items():
        start[name] = torch.randn(parameter.shape, generator=generator) * 0.5
    model.load_state_dict(start)
    optimizer = torch.optim.Adagrad(dense_parameters(model), lr=0.1)
    losses = []
    if pipelined:
        pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
        iterator = samples(6)
        while True:
            try:
                losses.append(pipeline.progress(iterator).item())
            except StopIteration:
                break
    else:
        for sample in samples(6):
            optimizer.zero_grad()
            loss, detached = model(sample)
            loss.backward()
            optimizer.step()
            losses.append(detached.item())
    weights = {key: whole(value) for key, value in model.state_dict().items()}
    return losses, {key: value for key, value in weights.items() if value is not None}


def planned_pipeline_equals_plain_loop() -> None:
    losses, weights = train(pipelined=False)
    piped_losses, piped_weights = train(pipelined=True)
    assert losses == piped_losses, (losses, piped_losses)
    assert weights.keys() == piped_weights.keys()
    for key, value in weights.items():
        torch.testing.assert_close(piped_weights[key], value, rtol=0, atol=0, msg=key)
    assert losses[-1] < losses[0]


def rows_are_known_on_every_rank() -> None:
    model = unsharded()
    planner = FlowTTEmbeddingShardingPlanner(topology=topology(), batch_size=6)
    rows = planner.placement_rows(planner.collective_plan(model, sharders()))
    everywhere: list = [None, None]
    dist.all_gather_object(everywhere, rows)
    assert everywhere[0] == everywhere[1]
    assert len(rows) == len(TABLES)


def optimizer_applied_in_backward() -> None:
    tables = [table for table in TABLES if table.place != "dp"]
    reference = Reference(tables)
    model = unsharded(tables)
    _apply_optimizer_in_backward(
        torch.optim.Adagrad, model.sparse.parameters(), {"lr": 0.05, "eps": 1e-6}
    )
    sharded = DistributedModelParallel(
        model, plan=plan_for(model, tables), sharders=[FlowTTEmbeddingBagCollectionSharder()]
    )
    sharded.load_state_dict(reference.state_dict())
    assert not dense_parameters(sharded)
    trainer = torch.optim.Adagrad(reference.parameters.values(), lr=0.05, eps=1e-6)
    order = reference.names()
    for step in range(5):
        batches = [batch(tables, rank, step) for rank in range(2)]
        trainer.zero_grad()
        (sum(target(reference.output(b), step) for b in batches) / 2).backward()
        trainer.step()
        pooled = sharded.module.sparse(batches[dist.get_rank()]).to_dict()
        target(torch.cat([pooled[name] for name in order], dim=1), step).backward()
    compare_state(sharded, reference, 2e-5)


def starts_as_configured() -> None:
    tables = [
        Table("tt_tw", "tw1", ["a"], rows=500, dim=16, ranks=(8, 8)),
        Table("tt_dp", "dp", ["b"], rows=500, dim=16, ranks=(8, 8)),
    ]
    torch.manual_seed(dist.get_rank())
    model = shard(tables, ADAGRAD)
    key = "sparse.embedding_bags.tt_dp.tt_cores.0"
    cores: list = [None, None]
    dist.all_gather_object(cores, model.state_dict()[key])
    assert torch.equal(cores[0], cores[1])
    kernels = [k for lookup in model.module.sparse._lookups for k in _kernels(lookup)]
    for kernel in kernels:
        for table, table_cores in kernel.tt_cores_by_table().items():
            dense = Reference(tables)
            for k, core in enumerate(table_cores):
                dense.parameters[f"sparse.embedding_bags.{table}.tt_cores.{k}"] = core.double()
            spec = next(t for t in tables if t.name == table)
            moment = dense.weight(spec).pow(2).mean().item()
            assert abs(moment * 3 * 500 - 1) < 0.05, (table, moment)


def _kernels(lookup: nn.Module) -> list:
    return list(getattr(lookup, "module", lookup)._emb_modules)


def weights_of_a_model_on_an_accelerator_are_kept() -> None:
    # TorchRec copies the weights of a collection that is sharded from a GPU, and draws new ones
    # otherwise. There is no GPU here, so the collection says that it is on one.
    model = unsharded(device="cpu")
    reference = Reference(TABLES)
    model.load_state_dict(reference.state_dict())
    with mock.patch.object(ShardingView, "device", torch.device("cuda")):
        sharded = DistributedModelParallel(model, plan=plan_for(model, TABLES), sharders=sharders())
    compare_state(sharded, reference, 1e-7)


def never_allocates_the_table() -> None:
    model = Model(
        FlowTTEmbeddingBagCollection(
            device="meta",
            tables=[
                FlowTTEmbeddingBagConfig(
                    name=name, num_embeddings=10**12, embedding_dim=64, tt_ranks=4,
                    feature_names=[name],
                )
                for name in ("huge_a", "huge_b")
            ],
        )
    )  # fmt: skip
    planner = FlowTTEmbeddingShardingPlanner(topology=topology(), batch_size=2)
    plan = planner.collective_plan(model, sharders())
    sharded = DistributedModelParallel(model, plan=plan, sharders=sharders())
    features = KeyedJaggedTensor(
        keys=["huge_a", "huge_b"],
        values=torch.tensor([0, 10**12 - 1, 5, 999_999_999_999]),
        lengths=torch.tensor([1, 1, 2, 0]),
    )
    pooled = sharded(features)
    pooled.sum().backward()
    assert pooled.shape == (2, 128)


def example_predicts_the_same_under_every_plan() -> None:
    """One state of the example's model, loaded unsharded and under plans of both tables."""
    example = runpy.run_path(str(REPOSITORY / "examples" / "mixed_tables.py"))
    model = example["ClickModel"]().to_empty(device="cpu")
    generator = torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator)
    features, _ = example["random_batch"](torch.device("cpu"))
    expected = model(features).detach()
    orders = set()
    for ads in ("tw0", "tw1", "dp"):
        for country in ("tw0", "tw1", "rw", "cw", "dp"):
            model_to_shard = example["ClickModel"]()
            places = [Table("ads", ads, []), Table("country", country, [], tt=False)]
            sharded = DistributedModelParallel(
                model_to_shard, plan=plan_for(model_to_shard, places), sharders=sharders()
            )
            sharded.load_state_dict(model.state_dict())
            torch.testing.assert_close(sharded(features).detach(), expected)
            orders.add(tuple(sharded.module.sparse(features).keys()))
    assert len(orders) == 2, orders


if __name__ == "__main__":
    run_on_rank(
        {
            check.__name__: check
            for check in (
                planned_pipeline_equals_plain_loop,
                rows_are_known_on_every_rank,
                optimizer_applied_in_backward,
                starts_as_configured,
                weights_of_a_model_on_an_accelerator_are_kept,
                never_allocates_the_table,
                example_predicts_the_same_under_every_plan,
            )
        }
    )
