"""Checks of refusals: the same error on every rank, none left waiting; run by test_refusals.py."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan as construct_torchrec_plan,
)
from torchrec.distributed.sharding_plan import table_wise
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.sharded_models import (
    ADAGRAD,
    TABLES,
    Model,
    Table,
    batch,
    plan_for,
    shard,
    sharders,
    topology,
    unsharded,
)
from tests.distributed.torchrun_launcher import run_on_rank
from torchrec_flowtt.distributed import (
    FlowTTEmbeddingBagCollection,
    FlowTTEmbeddingBagCollectionSharder,
    ShardedFlowTTEmbeddingBagCollection,
)
from torchrec_flowtt.planner import FlowTTEmbeddingShardingPlanner


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
    refused(ValueError, "tt_", "max_norm")(sharding_with(plan, {**ADAGRAD, "max_norm": 1.0}))


def fused_optimizers_without_cpu_kernel() -> None:
    """All that FBGEMM has no CPU kernel for, on tables of every kind that takes a fused one."""
    on_cpu = (
        "exact_sgd",
        "exact_adagrad",
        "exact_row_wise_adagrad",
        "ema_in_place_row_wise_adagrad",
    )
    for place in ("tw1", "rw", "cw"):
        tables = [Table("fb", place, ["a"], tt=False), Table("other", "dp", ["b"], tt=False)]
        for optimizer in EmbOptimType:
            fused_params = {"optimizer": optimizer, "learning_rate": 0.1}
            if optimizer.value in on_cpu:
                shard(tables, fused_params)
                continue
            refused(ValueError, "'fb'", f"'{optimizer.value}'", "'exact_adagrad'", "data_parallel")(
                functools.partial(shard, tables, fused_params)
            )
    refused(ValueError, "'fb_tw'", "'adam'")(
        functools.partial(shard, TABLES, {"optimizer": EmbOptimType.ADAM})
    )
    tt_and_dp = [table for table in TABLES if table.tt or table.place == "dp"]
    shard(tt_and_dp, {"optimizer": EmbOptimType.ADAM})


def fused_optimizers_set_on_parameters() -> None:
    model = unsharded()
    _apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), {"lr": 0.1})
    refused(ValueError, "'fb_tw'", "'adam'")(
        lambda: DistributedModelParallel(
            model, plan=plan_for(model, TABLES), sharders=sharders(), device=torch.device("cpu")
        )
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


def ids_of_dtype(values: torch.dtype, lengths: torch.dtype) -> KeyedJaggedTensor:
    features = batch(TABLES, dist.get_rank(), 0)
    return KeyedJaggedTensor(
        features.keys(), features.values().to(values), lengths=features.lengths().to(lengths)
    )


def dtypes_of_batches() -> None:
    """Ranks that exchange batches have one dtype, and keep it."""
    narrow, wide = torch.int32, torch.int64
    own = narrow if dist.get_rank() == 0 else wide
    for argument, dtypes in (("values", (own, wide)), ("lengths", (wide, own))):
        model = shard(TABLES, ADAGRAD)
        refused(TypeError, "'tt_a'", argument, "int32 on rank 0", "int64 on rank 1")(
            functools.partial(model, ids_of_dtype(*dtypes))
        )
    for values in (narrow, wide):
        for lengths in (narrow, wide):
            model = shard(TABLES, ADAGRAD)
            for _ in range(2):
                model(ids_of_dtype(values, lengths)).sum().backward()
            other = wide if values == narrow else narrow
            refused(TypeError, "'tt_a'", "values", "first batch", str(values), f"got {other}")(
                functools.partial(model, ids_of_dtype(other, lengths))
            )
            other = wide if lengths == narrow else narrow
            refused(TypeError, "'tt_a'", "lengths", "first batch", str(lengths), f"got {other}")(
                functools.partial(model, ids_of_dtype(values, other))
            )


def dtypes_of_batches_that_stay() -> None:
    """Data-parallel tables take what each rank has."""
    tables = [table for table in TABLES if table.place == "dp"]
    model = shard(tables, ADAGRAD)
    features = batch(tables, dist.get_rank(), 0)
    for step in range(2):
        dtype = torch.int32 if dist.get_rank() == step else torch.int64
        model(
            KeyedJaggedTensor(
                features.keys(), features.values().to(dtype), lengths=features.lengths().to(dtype)
            )
        ).sum().backward()


if __name__ == "__main__":
    run_on_rank(
        {
            check.__name__: check
            for check in (
                without_plan,
                torchrec_planner,
                wrong_plans,
                wrong_fused_params,
                fused_optimizers_without_cpu_kernel,
                fused_optimizers_set_on_parameters,
                planning_errors_reach_every_rank,
                wrong_collections_and_sharders,
                two_dimensional_parallelism,
                dynamic_resharding,
                dtypes_of_batches,
                dtypes_of_batches_that_stay,
            )
        }
    )
