"""Table-wise and data-parallel sharding of tables among which some are TT tables.

Features are exchanged and embeddings returned exactly as TorchRec does it for its own tables; only
the lookup differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingSharding
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
from torchrec.distributed.types import ParameterSharding, ShardingEnv

from torchrec_flowtt.distributed import compat
from torchrec_flowtt.distributed.core_states import CorePlacement
from torchrec_flowtt.distributed.lookup import (
    FlowTTGroupedEmbeddingsLookup,
    FlowTTGroupedPooledEmbeddingsLookup,
)
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


class _TableWise:
    """Table-wise sharding of TT tables, beside a sharding of TorchRec, the other base class."""

    def __init__(
        self,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        **kwargs: Any,
    ) -> None:
        """Builds it; see the class for the arguments."""
        super().__init__(sharding_infos, env, device, **kwargs)  # type: ignore[call-arg]
        tt_specs = tt_specs_of(sharding_infos)
        self._lookup_arguments: dict[str, Any] = {
            "tt_specs": tt_specs,
            "placements": {
                info.embedding_config.name: core_placement(info.param_sharding, env)
                for info in sharding_infos
                if info.embedding_config.name in tt_specs
            },
            "pg": env.process_group,
            "env": env,
        }


class _DataParallel:
    """Data-parallel sharding of TT tables, beside a sharding of TorchRec, the other base class."""

    def __init__(
        self,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> None:
        """Builds it; see the class for the arguments."""
        super().__init__(sharding_infos, env, device)  # type: ignore[call-arg]
        self._lookup_arguments: dict[str, Any] = {
            "tt_specs": tt_specs_of(sharding_infos),
            "placements": None,
            "pg": env.process_group,
            "env": env,
        }


class _PooledLookup:
    """Makes the lookup of pooled embeddings."""

    _lookup_arguments: dict[str, Any]
    # In data-parallel sharding DDP averages the gradients of the weights already.
    _scale_weight_gradients: ClassVar[bool] = True

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> FlowTTGroupedPooledEmbeddingsLookup:
        """The lookup of this rank's tables."""
        return FlowTTGroupedPooledEmbeddingsLookup(
            **self._lookup_arguments,
            **compat.lookup_groups(self, device),
            feature_processor=feature_processor,
            scale_weight_gradients=self._scale_weight_gradients,
        )


class _SequenceLookup:
    """Makes the lookup of sequence embeddings."""

    _lookup_arguments: dict[str, Any]

    def create_lookup(
        self,
        device: torch.device | None = None,
        fused_params: dict[str, Any] | None = None,
        feature_processor: Any = None,
    ) -> FlowTTGroupedEmbeddingsLookup:
        """The lookup of this rank's tables."""
        return FlowTTGroupedEmbeddingsLookup(
            **self._lookup_arguments, **compat.lookup_groups(self, device)
        )


class FlowTTTwPooledEmbeddingSharding(_PooledLookup, _TableWise, TwPooledEmbeddingSharding):
    """Table-wise sharding: each table, with all its TT-cores, on one rank."""


class FlowTTDpPooledEmbeddingSharding(_PooledLookup, _DataParallel, DpPooledEmbeddingSharding):
    """Data-parallel sharding: every rank holds all TT-cores, DDP reduces their gradients."""

    _scale_weight_gradients: ClassVar[bool] = False


class FlowTTTwSequenceEmbeddingSharding(_SequenceLookup, _TableWise, TwSequenceEmbeddingSharding):
    """Table-wise sharding of sequence embeddings."""


class FlowTTDpSequenceEmbeddingSharding(
    _SequenceLookup, _DataParallel, DpSequenceEmbeddingSharding
):
    """Data-parallel sharding of sequence embeddings."""
