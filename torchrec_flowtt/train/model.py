"""Builds the sharded model and its optimizers: the one place that knows which classes are used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingType
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_flowtt.config import ConfigError, JobConfig
from torchrec_flowtt.config.schema import DenseOptimizerConfig, SparseOptimizerConfig
from torchrec_flowtt.distributed import (
    FlowTTEmbeddingBagCollection,
    FlowTTEmbeddingBagCollectionSharder,
    FlowTTEmbeddingBagConfig,
)
from torchrec_flowtt.modules import RowWiseAdagrad
from torchrec_flowtt.planner import FlowTTEmbeddingShardingPlanner
from torchrec_flowtt.train.processes import Processes, lost_another_process
from torchrec_flowtt.train.table_initialization import SeededUniform
from torchrec_flowtt.train.tables import Table


@dataclass(frozen=True)
class ShardedModel:
    """What the training loop works on.

    Attributes:
        model: the DLRM with its loss, under DistributedModelParallel.
        optimizer: fused, dense and data-parallel optimizers as one, keyed by parameter name.
        plan: where each table is.
    """

    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    plan: ShardingPlan


def build_sharded_model(
    config: JobConfig,
    tables: Sequence[Table],
    num_dense: int,
    processes: Processes,
    recorded: Mapping[str, str],
) -> ShardedModel:
    """Builds, plans and shards the model on every rank.

    Args:
        config: the configuration.
        tables: all tables of the model, in the order of their features.
        num_dense: columns of the dense features.
        processes: this process and the others.
        recorded: sharding types of a checkpoint's tables, which ``auto`` follows; empty without.

    Raises:
        ConfigError: the tables cannot be placed or built so.
    """
    try:
        module = _model(config, tables, num_dense, processes.device)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"the model cannot be built so: {_first_line(error)}") from None
    sharders = _sharders(config.optimizer.sparse)
    planner = _planner(config, tables, processes, recorded)

    def make_plan() -> ShardingPlan:
        try:
            return planner.plan(module, sharders)
        except (PlannerError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"the planner finds no placement for the tables on {processes.world_size}"
                f" {processes.device.type} process(es): {_first_line(error)}"
            ) from None

    plan = processes.from_first(make_plan)
    # TT-cores draw from the global generator; with one seed, equal shapes on two ranks would get
    # equal cores.
    torch.manual_seed(config.seed * processes.world_size + processes.rank)
    try:
        model = DistributedModelParallel(
            module, device=processes.device, plan=plan, sharders=sharders
        )
        optimizer = _optimizer(config, model, plan)
    except (ValueError, RuntimeError) as error:
        if lost_another_process(error):
            raise
        raise ConfigError(f"the model cannot be built so: {_first_line(error)}") from None
    return ShardedModel(model, optimizer, plan)


def _model(
    config: JobConfig, tables: Sequence[Table], num_dense: int, device: torch.device
) -> DLRMTrain:
    collection = _collection(config, tables)
    torch.manual_seed(config.seed)
    dlrm = DLRM(
        embedding_bag_collection=collection,
        dense_in_features=num_dense,
        dense_arch_layer_sizes=list(config.model.dense_layers),
        over_arch_layer_sizes=list(config.model.over_layers),
        dense_device=device,
    )
    return DLRMTrain(dlrm)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _collection(config: JobConfig, tables: Sequence[Table]) -> EmbeddingBagCollection:
    # One pooling for all tables: TorchRec divides table-wise sums by the bag lengths when a
    # row-wise mean table is in the same collection.
    pooling = PoolingType.MEAN if config.model.pooling == "mean" else PoolingType.SUM
    configs: list[EmbeddingBagConfig] = []
    for table in tables:
        arguments: dict[str, Any] = {
            "name": table.name,
            "num_embeddings": table.num_embeddings,
            "embedding_dim": table.embedding_dim,
            "feature_names": [table.name],
            "pooling": pooling,
        }
        if table.spec is None:
            init = SeededUniform(table.name, table.num_embeddings, table.embedding_dim, config.seed)
            configs.append(EmbeddingBagConfig(**arguments, init_fn=init))
        else:
            configs.append(
                FlowTTEmbeddingBagConfig(
                    **arguments,
                    tt_ranks=table.spec.tt_ranks,
                    p_shapes=table.spec.p_shapes,
                    q_shapes=table.spec.q_shapes,
                )
            )
    device = torch.device("meta")
    if any(table.spec is not None for table in tables):
        return FlowTTEmbeddingBagCollection(device=device, tables=configs)
    # Without TT tables the run is plain TorchRec, which makes it a fair baseline.
    return EmbeddingBagCollection(device=device, tables=configs)


def _sharders(sparse: SparseOptimizerConfig) -> list[ModuleSharder[nn.Module]]:
    fused_params = _fused_params(sparse)
    return [
        FlowTTEmbeddingBagCollectionSharder(fused_params=fused_params),
        EmbeddingBagCollectionSharder(fused_params=fused_params),
    ]


def _fused_params(sparse: SparseOptimizerConfig) -> dict[str, Any]:
    # FBGEMM is imported late: it is slow to load and its absence is reported elsewhere.
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    optimizer = {
        "sgd": EmbOptimType.EXACT_SGD,
        "adagrad": EmbOptimType.EXACT_ADAGRAD,
        "row_wise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "adam": EmbOptimType.ADAM,
    }[sparse.name]
    return {
        "optimizer": optimizer,
        "learning_rate": sparse.learning_rate,
        "eps": sparse.eps,
        "weight_decay": sparse.weight_decay,
    }


def _planner(
    config: JobConfig,
    tables: Sequence[Table],
    processes: Processes,
    recorded: Mapping[str, str],
) -> FlowTTEmbeddingShardingPlanner:
    topology = Topology(
        world_size=processes.world_size,
        local_world_size=processes.local_world_size,
        compute_device=processes.device.type,
    )
    return FlowTTEmbeddingShardingPlanner(
        topology=topology,
        batch_size=config.train.batch_size // processes.world_size,
        constraints={table.name: _constraints(table, recorded.get(table.name)) for table in tables},
    )


def _constraints(table: Table, recorded: str | None) -> ParameterConstraints:
    if table.rule.sharding != "auto":
        return ParameterConstraints(sharding_types=[table.rule.sharding])
    if recorded is None:
        return ParameterConstraints()
    if recorded == ShardingType.DATA_PARALLEL.value:
        return ParameterConstraints(sharding_types=[recorded])
    # Fused state moves freely between the fused placements, of which every device has this one.
    return ParameterConstraints(sharding_types=[ShardingType.TABLE_WISE.value])


def _optimizer(
    config: JobConfig, model: DistributedModelParallel, plan: ShardingPlan
) -> CombinedOptimizer:
    replicated = data_parallel_tables(plan)
    dense: dict[str, nn.Parameter] = {}
    sparse: dict[str, nn.Parameter] = {}
    for name, parameter in in_backward_optimizer_filter(model.named_parameters()):
        table = name.partition(".embedding_bags.")[2].partition(".")[0]
        (sparse if table in replicated else dense)[name] = parameter
    optimizers: list[KeyedOptimizer] = [model.fused_optimizer]
    optimizers.append(KeyedOptimizerWrapper(dense, _dense_factory(config.optimizer.dense)))
    if sparse:
        optimizers.append(KeyedOptimizerWrapper(sparse, _sparse_factory(config.optimizer.sparse)))
    return CombinedOptimizer(optimizers)


def table_sharding(plan: ShardingPlan) -> dict[str, str]:
    """TorchRec's sharding type of every table."""
    return {
        table: sharding.sharding_type
        for module_plan in plan.plan.values()
        for table, sharding in _table_shardings(module_plan).items()
    }


def data_parallel_tables(plan: ShardingPlan) -> set[str]:
    """The names of the tables that every rank holds whole."""
    replicated = ShardingType.DATA_PARALLEL.value
    return {table for table, sharding in table_sharding(plan).items() if sharding == replicated}


def _table_shardings(module_plan: object) -> Mapping[str, Any]:
    assert isinstance(module_plan, dict)
    return module_plan


def _dense_factory(dense: DenseOptimizerConfig) -> Any:
    kinds = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
    kind: Any = kinds[dense.name]
    return lambda params: kind(params, lr=dense.learning_rate, weight_decay=dense.weight_decay)


def _sparse_factory(sparse: SparseOptimizerConfig) -> Any:
    """The fused optimizer's counterpart for tables whose gradients arrive dense."""
    settings: dict[str, Any] = {"lr": sparse.learning_rate, "weight_decay": sparse.weight_decay}
    if sparse.name != "sgd":
        settings["eps"] = sparse.eps
    kinds = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "row_wise_adagrad": RowWiseAdagrad,
        "adam": torch.optim.Adam,
    }
    kind: Any = kinds[sparse.name]
    return lambda params: kind(params, **settings)
