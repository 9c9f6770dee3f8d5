"""The sharded collection of TT and uncompressed embedding bags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import PoolingType

from torchrec_flowtt.distributed import compat
from torchrec_flowtt.distributed.batch_requirements import BatchRequirements
from torchrec_flowtt.distributed.ebc import FlowTTEmbeddingBagCollection
from torchrec_flowtt.distributed.sharded_tables import ShardedTTTables, validate_optimizers
from torchrec_flowtt.distributed.sharding import (
    FlowTTDpPooledEmbeddingSharding,
    FlowTTTwPooledEmbeddingSharding,
    tt_specs_of,
)
from torchrec_flowtt.distributed.sharding_view import ShardingView

_ROW_WISE = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)


class ShardedFlowTTEmbeddingBagCollection(ShardedTTTables, ShardedEmbeddingBagCollection):
    """TorchRec's sharded collection, with TT tables table-wise or data-parallel.

    Uncompressed tables keep every sharding type and kernel they have. Parameters, buffers and
    state-dict keys of a TT table are ``embedding_bags.<table>.tt_cores.<k>``: a distributed tensor
    of one shard when table-wise, a plain tensor on every rank when data-parallel.

    Built by :class:`FlowTTEmbeddingBagCollectionSharder`, which checks the plan first.

    Args:
        module: what is sharded, as TorchRec's base class can read it.
        table_name_to_parameter_sharding: the plan of this module.
        env: sharding environment.
        **kwargs: as for ``ShardedEmbeddingBagCollection``.
    """

    TABLES: ClassVar[str] = "embedding_bags"

    def __init__(
        self,
        module: ShardingView,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        **kwargs: Any,
    ) -> None:
        """Builds it; see the class for the arguments."""
        super().__init__(module, table_name_to_parameter_sharding, env, **kwargs)
        is_weighted = module.is_weighted()
        self._prepare_batches(
            BatchRequirements(module.embedding_bag_configs(), is_weighted),
            is_weighted,
            table_name_to_parameter_sharding,
            env,
        )
        self._exempt_from_late_mean_pooling(table_name_to_parameter_sharding)
        self._combine_optimizers(
            self.sharding_type_to_sharding_infos.get(ShardingType.TABLE_WISE.value, [])
        )

    def take_weights_after_exchange(self) -> None:
        """Lets batches come without weights, as feature processors make them on the other side."""
        self._batch_requirements.weights_come_later = True

    def _exempt_from_late_mean_pooling(self, plan: Mapping[str, ParameterSharding]) -> None:
        # Only row-wise tables are pooled by mean after the all-to-all; see the function called.
        late = compat.summed_row_wise_features(self)
        if PoolingType.MEAN.value not in late:
            return
        for config in self._all_configs():
            if plan[config.name].sharding_type not in _ROW_WISE:
                late[PoolingType.SUM.value].extend(config.feature_names)

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, Any] | None = None,
    ) -> EmbeddingSharding[Any, Any, Any, Any]:
        """The sharding of the tables of one sharding type.

        Raises:
            ValueError: if a TT table has fused parameters that TT tables cannot honour, or an
                uncompressed one a fused optimizer that FBGEMM does not have on the CPU.
        """
        validate_optimizers(sharding_infos, device)
        if not tt_specs_of(sharding_infos):
            return super().create_embedding_bag_sharding(
                sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
            )
        if device is not None and device.type == "meta":
            compat.place_on_meta(sharding_infos)
        sharding_type = sharding_infos[0].param_sharding.sharding_type
        if sharding_type == ShardingType.DATA_PARALLEL.value:
            return FlowTTDpPooledEmbeddingSharding(sharding_infos, env, device)
        return FlowTTTwPooledEmbeddingSharding(
            sharding_infos,
            env,
            device,
            qcomm_codecs_registry=qcomm_codecs_registry,
        )

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The module this was sharded from."""
        return FlowTTEmbeddingBagCollection
