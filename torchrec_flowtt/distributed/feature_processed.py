"""The sharder of feature-processed collections with TT tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import (
    FeatureProcessedEmbeddingBagCollectionSharder,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_flowtt.distributed import compat
from torchrec_flowtt.distributed.sharded_ebc import ShardedFlowTTEmbeddingBagCollection
from torchrec_flowtt.distributed.sharder import (
    FlowTTEmbeddingBagCollectionSharder,
    refuse_torchrec_planner,
)
from torchrec_flowtt.distributed.tt_collection import has_tt_tables


class FlowTTFeatureProcessedEmbeddingBagCollectionSharder(
    FeatureProcessedEmbeddingBagCollectionSharder
):
    """Shards ``FeatureProcessedEmbeddingBagCollection``, also around TT tables.

    TorchRec's default sharders have one for the same module, and the last of a list is used: put
    this one behind them. It shards feature-processed collections without TT tables as TorchRec
    does.

    Args:
        ebc_sharder: the sharder of the collection inside; a default one if ``None``.
        qcomm_codecs_registry: quantised communication, if `ebc_sharder` is ``None``.

    Raises:
        TypeError: if `ebc_sharder` is no :class:`FlowTTEmbeddingBagCollectionSharder`.
    """

    def __init__(
        self,
        ebc_sharder: FlowTTEmbeddingBagCollectionSharder | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
    ) -> None:
        """Builds it; see the class for the arguments."""
        if ebc_sharder is None:
            ebc_sharder = FlowTTEmbeddingBagCollectionSharder(
                qcomm_codecs_registry=qcomm_codecs_registry
            )
        if not isinstance(ebc_sharder, FlowTTEmbeddingBagCollectionSharder):
            raise TypeError(
                "FlowTTFeatureProcessedEmbeddingBagCollectionSharder: ebc_sharder must be a "
                f"FlowTTEmbeddingBagCollectionSharder, got {type(ebc_sharder).__name__}"
            )
        super().__init__(ebc_sharder, ebc_sharder.qcomm_codecs_registry)
        self._collection_sharder = ebc_sharder
        self._without_tt = FeatureProcessedEmbeddingBagCollectionSharder(
            EmbeddingBagCollectionSharder(
                fused_params=ebc_sharder.fused_params,
                qcomm_codecs_registry=ebc_sharder.qcomm_codecs_registry,
            ),
            ebc_sharder.qcomm_codecs_registry,
        )

    def shard(
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedFeatureProcessedEmbeddingBagCollection:
        """The sharded module of this rank.

        Raises:
            ValueError: if the plan or the fused parameters do not fit the tables.
            NotImplementedError: under ``DMPCollection`` (2D parallelism).
        """
        if not has_tt_tables(module):
            return self._without_tt.shard(module, params, env, device, module_fqn)
        sharded = super().shard(module, params, env, device, module_fqn)
        collection = compat.processed_collection(sharded)
        if isinstance(collection, ShardedFlowTTEmbeddingBagCollection):
            collection.take_weights_after_exchange()
        return sharded

    def shardable_parameters(
        self, module: FeatureProcessedEmbeddingBagCollection
    ) -> dict[str, nn.Parameter]:
        """One two-dimensional parameter a table; that of a TT table is on the meta device."""
        if not has_tt_tables(module):
            parameters: dict[str, nn.Parameter] = self._without_tt.shardable_parameters(module)
            return parameters
        return self._collection_sharder.shardable_parameters(compat.processed_collection(module))

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """As the sharder of the collection inside; the planner picks each table's own."""
        return self._collection_sharder.compute_kernels(sharding_type, compute_device_type)

    @property
    def module_type(self) -> type[FeatureProcessedEmbeddingBagCollection]:
        """The type of module this sharder is for.

        Raises:
            RuntimeError: if the one who asks is about to plan TT tables with TorchRec's planner.
        """
        refuse_torchrec_planner()
        module_type: type[FeatureProcessedEmbeddingBagCollection] = (
            FeatureProcessedEmbeddingBagCollection
        )
        return module_type
