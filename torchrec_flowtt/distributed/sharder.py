"""The sharders of collections with TT tables."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ParameterSharding, ShardingEnv

from torchrec_flowtt.distributed import compat
from torchrec_flowtt.distributed.ebc import FlowTTEmbeddingBagCollection
from torchrec_flowtt.distributed.ec import FlowTTEmbeddingCollection
from torchrec_flowtt.distributed.plan_validation import (
    PLANNER_HINT,
    TT_COMPUTE_KERNEL,
    TT_SHARDING_TYPES,
    validate_plan,
)
from torchrec_flowtt.distributed.sharded_ebc import ShardedFlowTTEmbeddingBagCollection
from torchrec_flowtt.distributed.sharded_ec import ShardedFlowTTEmbeddingCollection
from torchrec_flowtt.distributed.sharding_view import SequenceShardingView, ShardingView
from torchrec_flowtt.distributed.table_parameters import tt_table_parameter
from torchrec_flowtt.distributed.tt_collection import TTTableCollection, has_tt_tables

_NO_PLANNER = (
    "this model has TT tables, which TorchRec's own planner cannot plan: it would charge them "
    f"num_embeddings x embedding_dim and does not know their kernel. {PLANNER_HINT}"
)


class TTTableSharder:
    """TT tables of a sharder of TorchRec, the other base class.

    Attributes:
        COLLECTION: the type of module that the sharder is for.
    """

    COLLECTION: ClassVar[type[nn.Module]]

    fused_params: dict[str, Any] | None
    qcomm_codecs_registry: dict[str, Any] | None

    def _checked_arguments(
        self,
        module: TTTableCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None,
        module_fqn: str | None,
    ) -> dict[str, Any]:
        """Arguments of a sharded module, once the plan is found to fit.

        Raises:
            ValueError: if the plan does not fit the tables.
            NotImplementedError: under ``DMPCollection`` (2D parallelism).
        """
        if compat.is_two_dimensional(env) and module.tt_tables():
            raise NotImplementedError(
                f"TT tables {sorted(module.tt_tables())} under DMPCollection: its replicas are "
                "synchronised for FBGEMM tables only, so TT-cores would drift apart. Use "
                "DistributedModelParallel."
            )
        validate_plan(module.table_configs(), params)
        return {
            "fused_params": self.fused_params,
            "device": device,
            "qcomm_codecs_registry": self.qcomm_codecs_registry,
            "module_fqn": module_fqn,
        }

    def shardable_parameters(self, module: TTTableCollection) -> dict[str, nn.Parameter]:
        """One two-dimensional parameter a table; that of a TT table is on the meta device."""
        tt_tables = module.tt_tables()
        return {
            name: (
                tt_table_parameter(tt_tables[name], module.tt_cores(name))
                if name in tt_tables
                else cast(nn.Parameter, table.weight)
            )
            for name, table in module.table_modules().items()
        }

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """TorchRec's kernels, and that of TT tables where they can be sharded so.

        TorchRec's own planner fails on a kernel it cannot estimate, even for a collection
        without TT tables, so it is not offered that of TT tables.
        """
        kernels: list[str] = super().compute_kernels(  # type: ignore[misc]
            sharding_type, compute_device_type
        )
        if sharding_type in TT_SHARDING_TYPES and compat.model_planned_by_torchrec() is None:
            return [*kernels, TT_COMPUTE_KERNEL]
        return kernels

    @property
    def module_type(self) -> type[nn.Module]:
        """The type of module this sharder is for.

        Raises:
            RuntimeError: if the one who asks is about to plan TT tables with TorchRec's planner.
        """
        refuse_torchrec_planner()
        return self.COLLECTION


def refuse_torchrec_planner() -> None:
    """Refuses to be asked for a module type by a planner that does not know TT tables.

    Raises:
        RuntimeError: if the model that is about to be planned so has TT tables.
    """
    model = compat.model_planned_by_torchrec()
    if model is not None and has_tt_tables(model):
        raise RuntimeError(_NO_PLANNER)


class FlowTTEmbeddingBagCollectionSharder(TTTableSharder, EmbeddingBagCollectionSharder):
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

    COLLECTION: ClassVar[type[nn.Module]] = FlowTTEmbeddingBagCollection

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
        arguments = self._checked_arguments(module, params, env, device, module_fqn)
        arguments.update(compat.module_order(self))
        return ShardedFlowTTEmbeddingBagCollection(ShardingView(module), params, env, **arguments)

    @property
    def sharded_module_type(self) -> type[ShardedFlowTTEmbeddingBagCollection]:
        """The type of module that :meth:`shard` returns."""
        return ShardedFlowTTEmbeddingBagCollection


class FlowTTEmbeddingCollectionSharder(TTTableSharder, EmbeddingCollectionSharder):
    """Shards :class:`FlowTTEmbeddingCollection`.

    Give it to ``DistributedModelParallel`` and to the planner beside TorchRec's default sharders;
    TorchRec finds a sharder by the exact type of the module.

    Args:
        fused_params: optimizer and kernel parameters, as for
            :class:`FlowTTEmbeddingBagCollectionSharder`.
        qcomm_codecs_registry: quantised communication, as TorchRec's sharders take it.
        **kwargs: further arguments of ``EmbeddingCollectionSharder``, such as
            ``use_index_dedup``.
    """

    COLLECTION: ClassVar[type[nn.Module]] = FlowTTEmbeddingCollection

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
        module: FlowTTEmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedFlowTTEmbeddingCollection:
        """The sharded module of this rank.

        Raises:
            ValueError: if the plan or the fused parameters do not fit the tables.
            NotImplementedError: under ``DMPCollection`` (2D parallelism).
        """
        arguments = self._checked_arguments(module, params, env, device, module_fqn)
        arguments["use_index_dedup"] = compat.uses_index_dedup(self)
        return ShardedFlowTTEmbeddingCollection(
            SequenceShardingView(module), params, env, **arguments
        )

    @property
    def sharded_module_type(self) -> type[ShardedFlowTTEmbeddingCollection]:
        """The type of module that :meth:`shard` returns."""
        return ShardedFlowTTEmbeddingCollection
