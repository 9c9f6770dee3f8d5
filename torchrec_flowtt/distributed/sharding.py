"""Table-wise and data-parallel sharding of tables among which some are TT tables.

Features are exchanged and embeddings returned exactly as TorchRec does it for its own tables; only
the lookup differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.types import ParameterSharding, ShardingEnv

from torchrec_flowtt.distributed.core_states import CorePlacement
from torchrec_flowtt.distributed.lookup import FlowTTGroupedPooledEmbeddingsLookup
from torchrec_flowtt.distributed.table_parameters import tt_spec_of
from torchrec_flowtt.shapes import TTSpec


def tt_specs_of(infos: Sequence[EmbeddingShardingInfo]) -> dict[str, TTSpec]:
    """TT shapes of the TT tables among `infos`, by table name."""
    specs = {info.embedding_config.name: tt_spec_of(info.param) for info in infos}
    return {name: spec for name, spec in specs.items() if spec is not None}


def core_placement(sharding: ParameterSharding, env: ShardingEnv) -> CorePlacement:
    """Where the cores of a table-wise TT table are."""
    return CorePlacement(
        placement=sharding.sharding_spec.shards[0].placement,
        process_group=env.process_group,
        device_mesh=env.device_mesh if env.output_dtensor else None,
    )


class FlowTTTwPooledEmbeddingSharding(TwPooledEmbeddingSharding):
    """Table-wise sharding: each table, with all its TT-cores, on one rank."""

    def __init__(
        self,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        **kwargs: Any,
    ) -> None:
        """Builds it; see the class for the arguments."""
        super().__init__(sharding_infos, env, device, **kwargs)
        self._tt_specs = tt_specs_of(sharding_infos)
        self._placements = {
            info.embedding_config.name: core_placement(info.param_sharding, env)
            for info in sharding_infos
            if info.embedding_config.name in self._tt_specs
        }

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> FlowTTGroupedPooledEmbeddingsLookup:
        """The lookup of this rank's tables."""
        return FlowTTGroupedPooledEmbeddingsLookup(
            tt_specs=self._tt_specs,
            placements=self._placements,
            grouped_configs=self._grouped_embedding_configs,
            pg=self._pg,
            device=device if device is not None else self._device,
            feature_processor=feature_processor,
            env=self._env,
        )


class FlowTTDpPooledEmbeddingSharding(DpPooledEmbeddingSharding):
    """Data-parallel sharding: every rank holds all TT-cores, DDP reduces their gradients."""

    def __init__(
        self,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> None:
        """Builds it; see the class for the arguments."""
        super().__init__(sharding_infos, env, device)
        self._tt_specs = tt_specs_of(sharding_infos)

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> FlowTTGroupedPooledEmbeddingsLookup:
        """The lookup of all data-parallel tables."""
        return FlowTTGroupedPooledEmbeddingsLookup(
            tt_specs=self._tt_specs,
            placements=None,
            grouped_configs=self._grouped_embedding_configs,
            pg=self._env.process_group,
            device=device if device is not None else self._device,
            feature_processor=feature_processor,
            # DDP averages the gradients of the weights already.
            scale_weight_gradients=False,
            env=self._env,
        )
