"""Checks of a sharding plan for a collection with TT tables, before anything is built.

They look at the plan and the configurations alone, which are the same on every rank, so that a
wrong plan is refused by all ranks and none is left waiting in a collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, PoolingType

from torchrec_flowtt.distributed.embedding_configs import TTTableConfig

#: Compute kernel of a TT table in sharding plans.
TT_COMPUTE_KERNEL: str = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value

#: Sharding types of TT tables.
TT_SHARDING_TYPES: tuple[str, ...] = (
    ShardingType.TABLE_WISE.value,
    ShardingType.DATA_PARALLEL.value,
)

_ROWS = (
    "a contiguous range of rows shares all but the first TT-core with every other range, so the "
    "ranks would have to sum the gradients of the shared cores, which TorchRec does not do"
)
_COLUMNS = (
    "a contiguous range of columns shares all but the first TT-core with every other range, so "
    "the ranks would have to sum the gradients of the shared cores, which TorchRec does not do"
)
#: Why a TT table cannot be sharded so.
REFUSED_SHARDING_TYPES: dict[str, str] = {
    ShardingType.ROW_WISE.value: _ROWS,
    ShardingType.TABLE_ROW_WISE.value: _ROWS,
    ShardingType.COLUMN_WISE.value: _COLUMNS,
    ShardingType.TABLE_COLUMN_WISE.value: _COLUMNS,
    ShardingType.GRID_SHARD.value: _COLUMNS,
}

PLANNER_HINT = (
    "Make the plan with torchrec_flowtt.planner.FlowTTEmbeddingShardingPlanner and pass it to "
    "DistributedModelParallel as plan=."
)

_ROW_WISE_TYPES = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)


def refusal(table: str, sharding_type: str) -> str:
    """The message for a TT table under a sharding type it does not have."""
    reason = REFUSED_SHARDING_TYPES.get(sharding_type, "it is unknown")
    return (
        f"TT table {table!r} cannot be sharded {sharding_type}: {reason}. "
        f"Use one of {', '.join(TT_SHARDING_TYPES)}."
    )


def validate_plan(
    configs: Sequence[BaseEmbeddingConfig], plan: Mapping[str, ParameterSharding]
) -> None:
    """Check that `plan` fits the tables.

    Raises:
        ValueError: if a table is missing from the plan; a TT table has another kernel than
            ``customized_kernel``, a sharding type it does not have, or more than one rank
            table-wise; or an uncompressed table has ``customized_kernel``.
    """
    for config in configs:
        if config.name not in plan:
            raise ValueError(
                f"table {config.name!r} is not in the sharding plan, which has "
                f"{sorted(plan)}. {PLANNER_HINT}"
            )
        sharding = plan[config.name]
        if not isinstance(config, TTTableConfig):
            if sharding.compute_kernel == TT_COMPUTE_KERNEL:
                raise ValueError(
                    f"table {config.name!r} is uncompressed, but the plan gives it the compute "
                    f"kernel {TT_COMPUTE_KERNEL!r}, which is for TT tables. "
                    f"{PLANNER_HINT}"
                )
            continue
        if sharding.sharding_type not in TT_SHARDING_TYPES:
            raise ValueError(refusal(config.name, sharding.sharding_type))
        if sharding.compute_kernel != TT_COMPUTE_KERNEL:
            raise ValueError(
                f"TT table {config.name!r}: the plan gives it the compute kernel "
                f"{sharding.compute_kernel!r}, expected {TT_COMPUTE_KERNEL!r}. {PLANNER_HINT}"
            )
        if sharding.sharding_type == ShardingType.TABLE_WISE.value:
            ranks = list(sharding.ranks or [])
            if len(ranks) != 1:
                raise ValueError(
                    f"TT table {config.name!r}: table_wise needs exactly one rank, got {ranks}"
                )
            spec: Any = sharding.sharding_spec
            placed = ranks if spec is None else [s.placement.rank() for s in spec.shards]
            if placed != ranks:
                raise ValueError(
                    f"TT table {config.name!r}: the plan's ranks are {ranks}, but its "
                    f"sharding_spec places shards on ranks {placed}. {PLANNER_HINT}"
                )
    _validate_mean_pooling(configs, plan)


def _validate_mean_pooling(
    configs: Sequence[BaseEmbeddingConfig], plan: Mapping[str, ParameterSharding]
) -> None:
    row_wise_mean = [
        config.name
        for config in configs
        # Tables of sequence embeddings have no pooling.
        if getattr(config, "pooling", None) == PoolingType.MEAN
        and plan[config.name].sharding_type in _ROW_WISE_TYPES
    ]
    if not row_wise_mean:
        return
    tables_by_feature: dict[str, list[str]] = {}
    for config in configs:
        for feature in config.feature_names:
            tables_by_feature.setdefault(feature, []).append(config.name)
    for feature, tables in tables_by_feature.items():
        if len(tables) > 1:
            raise ValueError(
                f"table {row_wise_mean[0]!r} is row-wise and pools by mean, and feature "
                f"{feature!r} feeds several tables ({', '.join(tables)}) of the same collection: "
                "TorchRec would divide the wrong columns by the bag lengths. Shard the row-wise "
                "mean tables another way, or put them in a collection of their own."
            )
