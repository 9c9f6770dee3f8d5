"""The sharder of collections with TT tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_flowtt.distributed import compat
from torchrec_flowtt.distributed.ebc import FlowTTEmbeddingBagCollection
from torchrec_flowtt.distributed.embedding_configs import FlowTTEmbeddingBagConfig
from torchrec_flowtt.distributed.plan_validation import (
    PLANNER_HINT,
    TT_COMPUTE_KERNEL,
    TT_SHARDING_TYPES,
    validate_plan,
)
from torchrec_flowtt.distributed.sharded_ebc import ShardedFlowTTEmbeddingBagCollection
from torchrec_flowtt.distributed.sharding_view import ShardingView
from torchrec_flowtt.distributed.table_parameters import tt_table_parameter

_NO_PLANNER = (
    "this model has TT tables, which TorchRec's own planner cannot plan: it would charge them "
    f"num_embeddings x embedding_dim and does not know their kernel. {PLANNER_HINT}"
)


class FlowTTEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """Shards :class:`FlowTTEmbeddingBagCollection`.

    Give it to ``DistributedModelParallel`` and to the planner beside TorchRec's default sharders;
    TorchRec finds a sharder by the exact type of the module.

    Args:
        fused_params: optimizer and kernel parameters, as TorchRec's sharders take them:
            ``optimizer`` (``EmbOptimType.EXACT_SGD``, ``EXACT_ADAGRAD``,
            ``EXACT_ROWWISE_ADAGRAD`` or ``ADAM`` for TT tables), ``learning_rate``, ``eps``,
            ``beta1``, ``beta2``, ``weight_decay``, ``output_dtype``, and whatever the
            uncompressed tables take. Optimizers set by ``apply_optimizer_in_backward`` come first.
        qcomm_codecs_registry: quantised communication, as TorchRec's sharders take it.
        **kwargs: further arguments of ``EmbeddingBagCollectionSharder``.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Builds it; see the class for the arguments."""
        super().__init__(
            fused_params=fused_params, qcomm_codecs_registry=qcomm_codecs_registry, **kwargs
        )

    def shard(
        self,
        module: FlowTTEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedFlowTTEmbeddingBagCollection:
        """The sharded module of this rank.

        Raises:
            ValueError: if the plan or the fused parameters do not fit the tables.
            NotImplementedError: under ``DMPCollection`` (2D parallelism).
        """
        if compat.is_two_dimensional(env) and module.tt_tables():
            raise NotImplementedError(
                f"TT tables {sorted(module.tt_tables())} under DMPCollection: its replicas are "
                "synchronised for FBGEMM tables only, so TT-cores would drift apart. Use "
                "DistributedModelParallel."
            )
        validate_plan(module.embedding_bag_configs(), params)
        kwargs: dict[str, Any] = {
            "fused_params": self.fused_params,
            "device": device,
            "qcomm_codecs_registry": self.qcomm_codecs_registry,
            "module_fqn": module_fqn,
            **compat.module_order(self),
        }
        return ShardedFlowTTEmbeddingBagCollection(ShardingView(module), params, env, **kwargs)

    def shardable_parameters(self, module: FlowTTEmbeddingBagCollection) -> dict[str, nn.Parameter]:
        """One two-dimensional parameter a table; that of a TT table is on the meta device."""
        tt_tables = module.tt_tables()
        return {
            name: (
                tt_table_parameter(tt_tables[name], module.tt_cores(name))
                if name in tt_tables
                else bag.weight
            )
            for name, bag in module.embedding_bags.items()
        }

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """TorchRec's kernels, and that of TT tables where they can be sharded so.

        TorchRec's own planner fails on a kernel it cannot estimate, even for a collection
        without TT tables, so it is not offered that of TT tables.
        """
        kernels: list[str] = super().compute_kernels(sharding_type, compute_device_type)
        if sharding_type in TT_SHARDING_TYPES and compat.model_planned_by_torchrec() is None:
            return [*kernels, TT_COMPUTE_KERNEL]
        return kernels

    @property
    def module_type(self) -> type[FlowTTEmbeddingBagCollection]:
        """The type of module this sharder is for.

        Raises:
            RuntimeError: if the one who asks is about to plan TT tables with TorchRec's planner.
        """
        refuse_torchrec_planner()
        return FlowTTEmbeddingBagCollection

    @property
    def sharded_module_type(self) -> type[ShardedFlowTTEmbeddingBagCollection]:
        """The type of module that :meth:`shard` returns."""
        return ShardedFlowTTEmbeddingBagCollection


def refuse_torchrec_planner() -> None:
    """Refuses to be asked for a module type by a planner that does not know TT tables.

    Raises:
        RuntimeError: if the model that is about to be planned so has TT tables.
    """
    model = compat.model_planned_by_torchrec()
    if model is not None and has_tt_tables(model):
        raise RuntimeError(_NO_PLANNER)


def has_tt_tables(model: nn.Module) -> bool:
    """Whether a collection somewhere in `model` has TT tables."""
    return any(
        isinstance(config, FlowTTEmbeddingBagConfig)
        for module in model.modules()
        if isinstance(module, EmbeddingBagCollection)
        for config in module.embedding_bag_configs()
    )
