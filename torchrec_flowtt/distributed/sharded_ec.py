"""The sharded collection of TT and uncompressed sequence embeddings."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_flowtt.distributed import compat
from torchrec_flowtt.distributed.batch_forms import with_one_empty_sample
from torchrec_flowtt.distributed.batch_requirements import BatchRequirements
from torchrec_flowtt.distributed.ec import FlowTTEmbeddingCollection
from torchrec_flowtt.distributed.sharded_tables import ShardedTTTables, validate_optimizers
from torchrec_flowtt.distributed.sharding import (
    FlowTTDpSequenceEmbeddingSharding,
    FlowTTTwSequenceEmbeddingSharding,
    tt_specs_of,
)
from torchrec_flowtt.distributed.sharding_view import SequenceShardingView


class ShardedFlowTTEmbeddingCollection(ShardedTTTables, ShardedEmbeddingCollection):
    """TorchRec's sharded collection, with TT tables table-wise or data-parallel.

    Uncompressed tables keep every sharding type and kernel they have. Parameters, buffers and
    state-dict keys of a TT table are ``embeddings.<table>.tt_cores.<k>``: a distributed tensor
    of one shard when table-wise, a plain tensor on every rank when data-parallel.

    Built by :class:`FlowTTEmbeddingCollectionSharder`, which checks the plan first.

    Args:
        module: what is sharded, as TorchRec's base class can read it.
        table_name_to_parameter_sharding: the plan of this module.
        env: sharding environment.
        **kwargs: as for ``ShardedEmbeddingCollection``.
    """

    TABLES: ClassVar[str] = "embeddings"

    def __init__(
        self,
        module: SequenceShardingView,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        **kwargs: Any,
    ) -> None:
        """Builds it; see the class for the arguments."""
        super().__init__(module, table_name_to_parameter_sharding, env, **kwargs)
        configs = module.embedding_configs()
        self._prepare_batches(
            BatchRequirements(configs, is_weighted=None),
            # Only the eviction from virtual tables looks at weights.
            any(getattr(config, "use_virtual_table", False) for config in configs),
            table_name_to_parameter_sharding,
            env,
        )
        infos = self.create_grouped_sharding_infos(
            module, table_name_to_parameter_sharding, kwargs.get("fused_params")
        )
        self._combine_optimizers(infos.get(ShardingType.TABLE_WISE.value, []))

    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
    ) -> EmbeddingSharding[Any, Any, Any, Any]:
        """The sharding of the tables of one sharding type.

        Raises:
            ValueError: if a TT table has fused parameters that TT tables cannot honour, or an
                uncompressed one a fused optimizer that FBGEMM does not have on the CPU.
        """
        validate_optimizers(sharding_infos, device)
        if not tt_specs_of(sharding_infos):
            return super().create_embedding_sharding(
                sharding_type, sharding_infos, env, device, qcomm_codecs_registry
            )
        if device is not None and device.type == "meta":
            compat.place_on_meta(sharding_infos)
        if sharding_type == ShardingType.DATA_PARALLEL.value:
            return FlowTTDpSequenceEmbeddingSharding(sharding_infos, env, device)
        return FlowTTTwSequenceEmbeddingSharding(
            sharding_infos,
            env,
            device,
            qcomm_codecs_registry=qcomm_codecs_registry,
        )

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Any:
        """Starts to send the features of a batch to the ranks of their tables.

        Raises:
            KeyError: a feature is not among the keys.
            TypeError, ValueError: something else is wrong with the batch, as far as this rank can
                see without reading its tensors.
        """
        extended = (
            with_one_empty_sample(features) if isinstance(features, KeyedJaggedTensor) else None
        )
        if extended is None:
            return super().input_dist(ctx, features)
        # TorchRec cannot arrange the lengths of 0 samples by features.
        ctx.has_no_samples = True
        return super().input_dist(ctx, extended)

    def output_dist(self, ctx: Any, output: Any) -> Any:
        """Starts to return the embeddings to the ranks that asked for them."""
        return _as_sent(ctx, super().output_dist(ctx, output))

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Looks up embeddings, and starts to return them."""
        return _as_sent(ctx, super().compute_and_output_dist(ctx, input))

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The module this was sharded from."""
        return FlowTTEmbeddingCollection


def _as_sent(ctx: Any, awaitable: Any) -> Any:
    """The output, without the sample that a batch of 0 samples was given."""
    if getattr(ctx, "has_no_samples", False):
        awaitable.callbacks.append(_without_samples)
    return awaitable


def _without_samples(output: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
    return {
        name: JaggedTensor(
            jagged.values(), lengths=jagged.lengths()[:0], weights=jagged.weights_or_none()
        )
        for name, jagged in output.items()
    }
