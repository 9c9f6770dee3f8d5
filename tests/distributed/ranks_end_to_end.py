"""Checks of the user's whole path, and of refusals; run by test_end_to_end.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan as construct_torchrec_plan,
)
from torchrec.distributed.sharding_plan import table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from tests.distributed.ranks_training import compare_state, whole
from tests.distributed.sharded_models import (
    Model,
    Reference,
    Table,
    batch,
    dense_parameters,
    plan_for,
    shard,
    target,
)
from tests.distributed.torchrun_launcher import run_on_rank
from torchrec_flowtt.distributed import (
    FlowTTEmbeddingBagCollection,
    FlowTTEmbeddingBagCollectionSharder,
    FlowTTEmbeddingBagConfig,
    ShardedFlowTTEmbeddingBagCollection,
)
from torchrec_flowtt.planner import FlowTTEmbeddingShardingPlanner

ADAGRAD = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.05, "eps": 1e-6}
TABLES = [
    Table("tt_a", "tw0", ["a", "b"], rows=60),
    Table("tt_b", "tw1", ["c"], rows=40, dim=12),
    Table("tt_c", "dp", ["d"], rows=40),
    Table("fb_tw", "tw1", ["e"], tt=False),
    Table("fb_dp", "dp", ["f"], tt=False),
]

FEATURES = [feature for table in TABLES for feature in table.features]


def unsharded(tables: list[Table] | None = None, device: str = "meta") -> Model:
    configs = [t.config() for t in (TABLES if tables is None else tables)]
    return Model(FlowTTEmbeddingBagCollection(tables=configs, device=device))


def topology() -> Topology:
    return Topology(world_size=2, local_world_size=2, compute_device="cpu")


def sharders() -> list:
    return [FlowTTEmbeddingBagCollectionSharder(fused_params=ADAGRAD), *get_default_sharders()]


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


# -- refusals: the same error on every rank, and no rank left waiting ---------------------------


def refused(kind: type[Exception], *parts: str) -> Callable[[Callable[[], object]], None]:
    def check(action: Callable[[], object]) -> None:
        message = None
        try:
            action()
        except kind as error:
            message = str(error)
        messages: list = [None, None]
        dist.all_gather_object(messages, message)
        assert messages[0] == messages[1] and messages[0] is not None, messages
        for part in parts:
            assert part in messages[0], (part, messages[0])

    return check


def without_plan() -> None:
    refused(RuntimeError, "FlowTTEmbeddingShardingPlanner", "plan=")(
        lambda: DistributedModelParallel(unsharded(), sharders=sharders())
    )


def torchrec_planner() -> None:
    planner = EmbeddingShardingPlanner(topology=topology())
    refused(RuntimeError, "FlowTTEmbeddingShardingPlanner")(
        lambda: planner.plan(unsharded(), sharders())
    )
    # A collection without TT tables is none of our business.
    plain = [t for t in TABLES if not t.tt]
    plan = planner.collective_plan(unsharded(plain), sharders())
    DistributedModelParallel(unsharded(plain), plan=plan, sharders=sharders())
    DistributedModelParallel(unsharded(plain), sharders=sharders())


def changed_plan(table: str, **changes: object) -> ShardingPlan:
    plan = plan_for(unsharded(), TABLES)
    sharding = plan.plan["sparse"][table]
    for name, value in changes.items():
        setattr(sharding, name, value)
    return plan


def sharding_with(plan: ShardingPlan, fused_params: dict | None = None) -> Callable[[], object]:
    return lambda: shard(TABLES, fused_params or ADAGRAD, plan=plan)


def wrong_plans() -> None:
    for sharding_type in ("row_wise", "column_wise", "table_row_wise", "grid_shard"):
        refused(ValueError, "tt_a", sharding_type, "gradients of the shared cores", "table_wise")(
            sharding_with(changed_plan("tt_a", sharding_type=sharding_type))
        )
    refused(ValueError, "tt_a", "'fused'", "FlowTTEmbeddingShardingPlanner")(
        sharding_with(changed_plan("tt_a", compute_kernel="fused"))
    )
    refused(ValueError, "fb_tw", "customized_kernel", "uncompressed")(
        sharding_with(changed_plan("fb_tw", compute_kernel="customized_kernel"))
    )
    refused(ValueError, "tt_a", "exactly one rank")(
        sharding_with(changed_plan("tt_a", ranks=[0, 1]))
    )
    incomplete = plan_for(unsharded(), TABLES)
    del incomplete.plan["sparse"]["tt_b"]
    refused(ValueError, "tt_b", "not in the sharding plan")(sharding_with(incomplete))


def wrong_fused_params() -> None:
    plan = plan_for(unsharded(), TABLES)
    refused(ValueError, "tt_", "lamb", "exact_adagrad")(
        sharding_with(plan, {"optimizer": EmbOptimType.LAMB})
    )
    refused(ValueError, "tt_", "gradient_clipping")(
        sharding_with(plan, {**ADAGRAD, "gradient_clipping": True})
    )


def planning_errors_reach_every_rank() -> None:
    def plan(constraints: dict, **kwargs: object) -> Callable[[], object]:
        planner = FlowTTEmbeddingShardingPlanner(
            topology=Topology(world_size=2, compute_device="cpu", **kwargs),
            constraints=constraints,
        )
        return lambda: planner.collective_plan(unsharded(), sharders())

    refused(ValueError, "tt_a", "ParameterConstraints", "customized_kernel")(
        plan({"tt_a": ParameterConstraints(compute_kernels=["fused"])})
    )
    refused(ValueError, "fb_dp", "customized_kernel")(
        plan(
            {
                "fb_dp": ParameterConstraints(
                    compute_kernels=["customized_kernel"], sharding_types=["table_wise"]
                )
            }
        )
    )
    refused(PlannerError, "storage")(plan({}, ddr_cap=1))


def wrong_collections_and_sharders() -> None:
    planner = FlowTTEmbeddingShardingPlanner(topology=topology())
    refused(ValueError, "sparse", "FlowTTEmbeddingBagCollectionSharder()")(
        lambda: planner.collective_plan(unsharded(), [EmbeddingBagCollectionSharder()])
    )
    plain = Model(EmbeddingBagCollection(device="meta", tables=[TABLES[0].config()]))
    refused(ValueError, "plain EmbeddingBagCollection", "tt_a")(
        lambda: planner.collective_plan(plain, sharders())
    )
    module_plan = construct_torchrec_plan(
        plain.sparse, {"tt_a": table_wise(rank=0)}, device_type="cpu"
    )
    refused(TypeError, "tt_a", "FlowTTEmbeddingBagCollection")(
        lambda: DistributedModelParallel(
            plain,
            plan=ShardingPlan({"sparse": module_plan}),
            sharders=[EmbeddingBagCollectionSharder()],
        )
    )


def two_dimensional_parallelism() -> None:
    model = unsharded()
    plan = plan_for(model, TABLES).plan["sparse"]
    env = ShardingEnv2D.__new__(ShardingEnv2D)
    refused(NotImplementedError, "tt_a", "DMPCollection")(
        lambda: FlowTTEmbeddingBagCollectionSharder().shard(model.sparse, plan, env)
    )


def dynamic_resharding() -> None:
    model = shard(TABLES, ADAGRAD)
    assert isinstance(model.module.sparse, ShardedFlowTTEmbeddingBagCollection)
    assert model.module.sparse.unsharded_module_type is FlowTTEmbeddingBagCollection
    env = ShardingEnv.from_process_group(dist.GroupMember.WORLD)
    refused(NotImplementedError, "tt_a", "checkpoint")(
        lambda: model.module.sparse.update_shards({}, env, None)
    )


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


if __name__ == "__main__":
    run_on_rank(
        {
            check.__name__: check
            for check in (
                planned_pipeline_equals_plain_loop,
                rows_are_known_on_every_rank,
                optimizer_applied_in_backward,
                starts_as_configured,
                without_plan,
                torchrec_planner,
                wrong_plans,
                wrong_fused_params,
                planning_errors_reach_every_rank,
                wrong_collections_and_sharders,
                two_dimensional_parallelism,
                dynamic_resharding,
                never_allocates_the_table,
            )
        }
    )
