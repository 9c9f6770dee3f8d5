"""Sharding plans written by hand for collections with TT tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan as construct_torchrec_plan,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan

from torchrec_flowtt.distributed.ebc import FlowTTEmbeddingBagCollection
from torchrec_flowtt.distributed.ec import FlowTTEmbeddingCollection
from torchrec_flowtt.distributed.plan_validation import TT_COMPUTE_KERNEL, validate_plan
from torchrec_flowtt.distributed.sharder import (
    FlowTTEmbeddingBagCollectionSharder,
    FlowTTEmbeddingCollectionSharder,
)


def construct_module_sharding_plan(
    module: FlowTTEmbeddingBagCollection | FlowTTEmbeddingCollection,
    per_param_sharding: Mapping[str, Any],
    sharder: FlowTTEmbeddingBagCollectionSharder | FlowTTEmbeddingCollectionSharder | None = None,
    **kwargs: Any,
) -> EmbeddingModuleShardingPlan:
    """TorchRec's function of this name, with the compute kernel of TT tables filled in.

    Args:
        module: the collection.
        per_param_sharding: for each table one of TorchRec's generators, such as
            ``table_wise(rank=0)`` or ``data_parallel()``.
        sharder: the sharder; a default one if ``None``.
        **kwargs: ``local_size``, ``world_size``, ``device_type`` as TorchRec takes them.

    Raises:
        ValueError: if a TT table is given a sharding type it does not have.

    Example:
        >>> from torchrec.distributed.sharding_plan import table_wise
        >>> from torchrec_flowtt.distributed import FlowTTEmbeddingBagConfig
        >>> ebc = FlowTTEmbeddingBagCollection(device="meta", tables=[
        ...     FlowTTEmbeddingBagConfig(name="ads", num_embeddings=10**9, embedding_dim=64,
        ...                              feature_names=["ad_id"], tt_ranks=16)])
        >>> plan = construct_module_sharding_plan(
        ...     ebc, {"ads": table_wise(rank=1)}, local_size=2, world_size=2, device_type="cpu")
        >>> plan["ads"].compute_kernel, plan["ads"].ranks
        ('customized_kernel', [1])
    """
    if sharder is None:
        is_pooled = isinstance(module, FlowTTEmbeddingBagCollection)
        sharder = (
            FlowTTEmbeddingBagCollectionSharder()
            if is_pooled
            else FlowTTEmbeddingCollectionSharder()
        )
    plan: EmbeddingModuleShardingPlan = construct_torchrec_plan(
        module,
        dict(per_param_sharding),
        sharder,
        **kwargs,
    )
    for table in module.tt_tables():
        plan[table].compute_kernel = TT_COMPUTE_KERNEL
    validate_plan(module.table_configs(), plan)
    return plan
