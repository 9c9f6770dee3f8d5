"""Checks of sharded sequence embeddings on two ranks; run by test_sharded_sequence.py."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.ranks_checkpoint import shared_folder
from tests.distributed.ranks_end_to_end import Sample
from tests.distributed.ranks_refusals import refused
from tests.distributed.ranks_training import compare_state, whole
from tests.distributed.sequence_models import (
    TABLES,
    SequenceModel,
    SequenceReference,
    SequenceTable,
    plan_for,
    shard,
)
from tests.distributed.sharded_models import (
    ADAGRAD,
    batch,
    dense_parameters,
    features_of,
    target,
    topology,
)
from tests.distributed.torchrun_launcher import run_on_rank
from torchrec_flowtt.distributed import (
    FlowTTEmbeddingBagCollectionSharder,
    FlowTTEmbeddingCollection,
    FlowTTEmbeddingCollectionSharder,
    ShardedFlowTTEmbeddingCollection,
)
from torchrec_flowtt.planner import FlowTTEmbeddingShardingPlanner

ONLY_TT = [table for table in TABLES if table.tt]


def loss_of(rows: dict[str, Tensor], step: int) -> Tensor:
    return sum(target(rows[name], step) for name in sorted(rows))


def rows_of(model, features: KeyedJaggedTensor) -> dict[str, Tensor]:
    return {name: jagged.values() for name, jagged in model(features).items()}


def optimizer_state(model) -> dict[str, dict[str, Tensor | None]]:
    """The state of TT tables, whole on rank 0."""
    state = model.fused_optimizer.state_dict()["state"]
    # In one order on all ranks, as each tensor is gathered by all of them.
    return {
        key: {name.split(".")[-1]: whole(value) for name, value in sorted(state[key].items())}
        for key in sorted(state)
        if ".tt_cores." in key
    }


def compare_training(
    tables: list[SequenceTable], sizes=(6, 6), steps: int = 4, **kwargs: object
) -> None:
    """Rows, and weights and sums of squares after some Adagrad steps, equal the reference's."""
    reference = SequenceReference(tables)
    model = shard(tables, ADAGRAD, need_indices=True, **kwargs)
    assert set(model.state_dict()) == set(reference.parameters)
    model.load_state_dict(reference.state_dict())
    compare_state(model, reference, 1e-7)
    dense = torch.optim.Adagrad(dense_parameters(model), lr=0.05, eps=1e-6)
    trainer = torch.optim.Adagrad(reference.parameters.values(), lr=0.05, eps=1e-6)
    rank = dist.get_rank()
    for step in range(steps):
        batches = [batch(tables, r, step, size=size) for r, size in enumerate(sizes)]
        trainer.zero_grad()
        expected = [reference.rows(b) for b in batches]
        (sum(loss_of(rows, step) for rows in expected) / 2).backward()
        output = dict(model(batches[rank]).items())
        assert set(output) == set(expected[rank])
        for name, rows in expected[rank].items():
            feature = batches[rank][name.split("@")[0]]
            torch.testing.assert_close(
                output[name].values().double(),
                rows.detach(),
                rtol=1e-5,
                atol=1e-5,
                msg=lambda text, name=name, step=step: f"{name} at step {step}: {text}",
            )
            assert torch.equal(output[name].lengths(), feature.lengths())
            assert torch.equal(output[name].weights(), feature.values())
        dense.zero_grad()
        loss_of({name: jagged.values() for name, jagged in output.items()}, step).backward()
        dense.step()
        trainer.step()
    compare_state(model, reference, 2e-5)
    found = optimizer_state(model)
    table_wise = [key for key in reference.parameters if "tt_c." not in key and ".tt_" in key]
    assert set(table_wise) <= set(found)
    for key in table_wise:
        if dist.get_rank() == 0:
            assert int(found[key]["iter"]) == steps
            sums = trainer.state[reference.parameters[key]]["sum"]
            torch.testing.assert_close(
                found[key]["momentum1"].double(), sums, rtol=1e-4, atol=1e-5, msg=key
            )


def tt_beside_fbgemm() -> None:
    compare_training(TABLES)


def only_tt_in_unequal_batches() -> None:
    compare_training(ONLY_TT, sizes=(7, 3))


def rank_without_samples() -> None:
    compare_training(ONLY_TT, sizes=(5, 0))


def loaded_from_the_unsharded_collection() -> None:
    """A collection with memory keeps its values when it is sharded."""
    torch.manual_seed(3)
    model = SequenceModel(ONLY_TT, device="cpu")
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    sharded = FlowTTEmbeddingCollectionSharder(ADAGRAD).shard(
        model.sequence,
        plan_for(model, ONLY_TT).plan["sequence"],
        ShardingEnv.from_process_group(dist.GroupMember.WORLD),
        torch.device("cpu"),
    )
    for key, value in sharded.state_dict().items():
        found = whole(value)
        if found is not None:
            assert torch.equal(found, expected["sequence." + key]), key


def batches_without_lookups() -> None:
    reference = SequenceReference(TABLES)
    model = shard(TABLES, ADAGRAD)
    model.load_state_dict(reference.state_dict())
    names = features_of(TABLES)
    zeros = torch.zeros(4 * len(names), dtype=torch.int64)
    for size, bags in (
        (4, {"lengths": zeros}),
        (0, {"lengths": zeros[:0], "stride": 0}),
        (0, {"lengths": zeros[:0]}),
        (0, {"offsets": zeros[:1]}),
    ):
        features = KeyedJaggedTensor(names, torch.empty(0, dtype=torch.int64), **bags)
        output = dict(model(features).items())
        for jagged in output.values():
            assert jagged.values().shape == (0, 8)
            assert jagged.lengths().shape == (size,)
        loss_of({name: jagged.values() for name, jagged in output.items()}, 0).backward()
    compare_state(model, reference, 1e-7)


def output_dtype() -> None:
    model = shard(ONLY_TT, {**ADAGRAD, "output_dtype": torch.float16})
    for rows in rows_of(model, batch(ONLY_TT, dist.get_rank(), 0)).values():
        assert rows.dtype is torch.float16


def refusals() -> None:
    model = SequenceModel(TABLES)

    def with_plan(table: str, **changes: object):
        plan = plan_for(model, TABLES)
        for name, value in changes.items():
            setattr(plan.plan["sequence"][table], name, value)
        return functools.partial(shard, TABLES, ADAGRAD, plan=plan)

    for sharding_type in ("row_wise", "column_wise", "table_row_wise", "grid_shard"):
        refused(ValueError, "tt_a", sharding_type, "gradients of the shared cores", "table_wise")(
            with_plan("tt_a", sharding_type=sharding_type)
        )
    refused(ValueError, "tt_a", "'fused'")(with_plan("tt_a", compute_kernel="fused"))
    refused(ValueError, "fb_tw", "customized_kernel", "uncompressed")(
        with_plan("fb_tw", compute_kernel="customized_kernel")
    )
    refused(ValueError, "tt_", "lamb")(
        functools.partial(shard, TABLES, {"optimizer": EmbOptimType.LAMB})
    )
    refused(ValueError, "'fb_tw'", "'adam'")(
        functools.partial(shard, TABLES, {"optimizer": EmbOptimType.ADAM})
    )
    sharders = [FlowTTEmbeddingCollectionSharder(ADAGRAD), *get_default_sharders()]
    refused(RuntimeError, "FlowTTEmbeddingShardingPlanner", "plan=")(
        lambda: DistributedModelParallel(SequenceModel(TABLES), sharders=sharders)
    )
    planner = FlowTTEmbeddingShardingPlanner(topology=topology())
    refused(ValueError, "sequence", "FlowTTEmbeddingCollectionSharder()")(
        lambda: planner.collective_plan(model, [FlowTTEmbeddingBagCollectionSharder()])
    )
    refused(NotImplementedError, "tt_a", "DMPCollection")(
        lambda: sharders[0].shard(
            model.sequence,
            plan_for(model, TABLES).plan["sequence"],
            ShardingEnv2D.__new__(ShardingEnv2D),
        )
    )
    sharded = shard(TABLES, ADAGRAD).module.sequence
    assert isinstance(sharded, ShardedFlowTTEmbeddingCollection)
    assert sharded.unsharded_module_type is FlowTTEmbeddingCollection
    refused(NotImplementedError, "tt_a", "checkpoint")(lambda: sharded.update_shards())


def wrong_batches() -> None:
    model = shard(TABLES, ADAGRAD)
    features = batch(TABLES, dist.get_rank(), 0)
    own = torch.int32 if dist.get_rank() == 0 else torch.int64
    refused(TypeError, "'tt_a'", "values", "int32 on rank 0", "int64 on rank 1")(
        lambda: model(
            KeyedJaggedTensor(
                features.keys(), features.values().to(own), lengths=features.lengths()
            )
        )
    )
    refused(KeyError, "feature 'a' of table 'tt_a'")(
        lambda: model(KeyedJaggedTensor(["x"], torch.tensor([0]), lengths=torch.tensor([1])))
    )


class Job:
    """A model, its optimizers, and the checkpoint of both."""

    def __init__(self, tables: list[SequenceTable], **kwargs: object) -> None:
        self.tables = tables
        self.model = shard(tables, ADAGRAD, **kwargs)
        parameters = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        dense = KeyedOptimizerWrapper(parameters, lambda p: torch.optim.Adagrad(p, lr=0.05))
        self.optimizer = CombinedOptimizer([("", self.model.fused_optimizer), ("", dense)])

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            rows = rows_of(self.model, batch(self.tables, dist.get_rank(), step))
            loss = loss_of(rows, step)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def state(self) -> dict:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def checkpoint_on_swapped_ranks() -> None:
    job = Job(TABLES)
    job.train(range(3))
    folder = shared_folder()
    dcp.save(job.state(), checkpoint_id=folder)
    expected = job.train(range(3, 6))
    swapped = {"tw0": "tw1", "tw1": "tw0"}
    tables = [
        SequenceTable(
            t.name, swapped.get(t.place, t.place), t.features, t.tt, t.rows, ranks=t.ranks
        )
        for t in TABLES
    ]
    torch.manual_seed(99)
    resumed = Job(tables)
    state = resumed.state()
    dcp.load(state, checkpoint_id=folder)
    resumed.model.load_state_dict(state["model"])
    resumed.optimizer.load_state_dict(state["optimizer"])
    assert resumed.train(range(3, 6)) == expected


class Click(nn.Module):
    """A collection, a dense layer, and a loss, as pipelines run them."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence = SequenceModel(TABLES).sequence
        self.dense = nn.Linear(8, 1)

    def forward(self, sample: Sample) -> tuple[Tensor, Tensor]:
        rows = self.sequence(sample.features)
        names = ["a", "shared@tt_a", "b", "h", "c", "d", "e", "f"]
        loss = sum(self.dense(rows[name].values()).square().sum() for name in names)
        return loss, loss.detach()


def planned_pipeline_equals_plain_loop() -> None:
    def train(pipelined: bool) -> list[float]:
        torch.manual_seed(5)
        model = Click()
        sharders = [FlowTTEmbeddingCollectionSharder(ADAGRAD), *get_default_sharders()]
        planner = FlowTTEmbeddingShardingPlanner(topology=topology(), batch_size=6)
        plan = planner.collective_plan(model, sharders)
        kernels = {row.table: row.kernel for row in planner.placement_rows(plan)}
        assert kernels.keys() == {table.name for table in TABLES}
        assert all((kernels[table.name] == "flowtt") == table.tt for table in TABLES)
        model = DistributedModelParallel(
            model, device=torch.device("cpu"), plan=plan, sharders=sharders
        )
        optimizer = torch.optim.Adagrad(dense_parameters(model), lr=0.1)
        samples = [
            Sample(batch(TABLES, dist.get_rank(), step), torch.zeros(6)) for step in range(5)
        ]
        losses = []
        if pipelined:
            pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
            iterator = iter(samples)
            for _ in samples:
                losses.append(pipeline.progress(iterator).item())
            return losses
        for sample in samples:
            optimizer.zero_grad()
            loss, detached = model(sample)
            loss.backward()
            optimizer.step()
            losses.append(detached.item())
        return losses

    losses = train(pipelined=False)
    assert losses == train(pipelined=True)
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    run_on_rank(
        {
            check.__name__: check
            for check in (
                tt_beside_fbgemm,
                only_tt_in_unequal_batches,
                loaded_from_the_unsharded_collection,
                batches_without_lookups,
                output_dtype,
                refusals,
                wrong_batches,
                checkpoint_on_swapped_ranks,
                planned_pipeline_equals_plain_loop,
                rank_without_samples,
            )
        }
    )
