"""The sharded collection of TT and uncompressed embedding bags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from pyre_extensions import none_throws
from torch import nn
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_flowtt.distributed import compat
from torchrec_flowtt.distributed.batch_forms import for_exchange
from torchrec_flowtt.distributed.batch_requirements import BatchRequirements
from torchrec_flowtt.distributed.core_states import CorePlacement, local_core
from torchrec_flowtt.distributed.cpu_optimizers import refuse_optimizers_without_cpu_kernel
from torchrec_flowtt.distributed.ebc import FlowTTEmbeddingBagCollection
from torchrec_flowtt.distributed.embedding_configs import FlowTTEmbeddingBagConfig
from torchrec_flowtt.distributed.exchanged_dtypes import ExchangedDtypes
from torchrec_flowtt.distributed.fused_optimizer import (
    RemoteTable,
    RemoteTablesOptimizer,
    StatefulCombinedOptimizer,
    mark_in_backward,
)
from torchrec_flowtt.distributed.fused_params import FusedOptimizerParams
from torchrec_flowtt.distributed.kernels import FlowTTEmbeddingBagKernel
from torchrec_flowtt.distributed.sharding import (
    FlowTTDpPooledEmbeddingSharding,
    FlowTTTwPooledEmbeddingSharding,
    core_placement,
    tt_specs_of,
)
from torchrec_flowtt.distributed.sharding_view import ShardingView
from torchrec_flowtt.distributed.table_parameters import tt_spec_of

_ROW_WISE = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value)


class ShardedFlowTTEmbeddingBagCollection(ShardedEmbeddingBagCollection):
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

    def __init__(
        self,
        module: ShardingView,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        **kwargs: Any,
    ) -> None:
        """Builds it; see the class for the arguments."""
        super().__init__(module, table_name_to_parameter_sharding, env, **kwargs)
        self._batch_requirements = BatchRequirements(
            module.embedding_bag_configs(), module.is_weighted()
        )
        self._first_keys: list[str] | None = None
        exchanges = env.process_group is not None and any(
            sharding.sharding_type != ShardingType.DATA_PARALLEL.value
            for sharding in table_name_to_parameter_sharding.values()
        )
        self._exchanged_dtypes = (
            ExchangedDtypes(env.process_group, self._batch_requirements.label)
            if exchanges
            else None
        )
        self._exempt_from_late_mean_pooling(table_name_to_parameter_sharding)
        optimizers = compat.fused_optimizers(self)
        remote = self._remote_tables()
        if remote:
            optimizers.append(("", RemoteTablesOptimizer(remote, "embedding_bags.")))
        self._stateful_optimizer = StatefulCombinedOptimizer(optimizers)

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Any:
        """Starts to send the features of a batch to the ranks of their tables.

        Raises:
            KeyError: a feature is not among the keys.
            TypeError, ValueError: something else is wrong with the batch, as far as this rank can
                see without reading its tensors.
        """
        if isinstance(features, KeyedJaggedTensor):
            self._batch_requirements.check_form(features, self._first_keys)
            features = for_exchange(features, self._batch_requirements.is_weighted)
        try:
            if isinstance(features, KeyedJaggedTensor):
                # On a GPU only an exchange reads the lengths anyway.
                if self._exchanged_dtypes is not None or features.values().device.type == "cpu":
                    self._batch_requirements.check_lengths(features)
                if self._exchanged_dtypes is not None:
                    self._exchanged_dtypes.check(features)
            distributed = super().input_dist(ctx, features)
        except Exception as error:
            self._batch_requirements.explain(features, error)
            raise
        if self._first_keys is None and isinstance(features, KeyedJaggedTensor):
            self._first_keys = list(features.keys())
        return distributed

    def take_weights_after_exchange(self) -> None:
        """Lets batches come without weights, as feature processors make them on the other side."""
        self._batch_requirements.weights_come_later = True

    def _remote_tables(self) -> dict[str, RemoteTable]:
        env = compat.sharding_env(self)
        if env.process_group is None:
            return {}
        here = {table for kernel in self._tt_kernels() for table in kernel.tables}
        infos = self.sharding_type_to_sharding_infos.get(ShardingType.TABLE_WISE.value, [])
        remote = {}
        for info in infos:
            name, spec = info.embedding_config.name, tt_spec_of(info.param)
            if spec is not None and name not in here:
                params = FusedOptimizerParams.from_fused_params(info.fused_params, name)
                placement = core_placement(info.param_sharding, env)
                remote[name] = RemoteTable(spec, info.param.dtype, params.config, placement)
        return remote

    @property
    def fused_optimizer(self) -> StatefulCombinedOptimizer:
        """The optimizers that step inside the backward pass, TT and FBGEMM."""
        return self._stateful_optimizer

    def keep_packed_cores(self, keep: bool = True) -> None:
        """As the unsharded collection's method, of the TT tables that this rank looks up."""
        for kernel in self._tt_kernels():
            kernel.emb_module.keep_packed_cores(keep)

    def refresh_packed_cores(self) -> None:
        """As the unsharded collection's method, of the TT tables that this rank looks up."""
        for kernel in self._tt_kernels():
            kernel.emb_module.refresh_packed_cores()

    def _exempt_from_late_mean_pooling(self, plan: Mapping[str, ParameterSharding]) -> None:
        # Only row-wise tables are pooled by mean after the all-to-all; see the function called.
        late = compat.summed_row_wise_features(self)
        if PoolingType.MEAN.value not in late:
            return
        for config in self._all_configs():
            if plan[config.name].sharding_type not in _ROW_WISE:
                late[PoolingType.SUM.value].extend(config.feature_names)

    def _all_configs(self) -> list[Any]:
        return list(compat.table_configs(self))

    def _tt_tables(self) -> list[str]:
        return [c.name for c in self._all_configs() if isinstance(c, FlowTTEmbeddingBagConfig)]

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
        specs = tt_specs_of(sharding_infos)
        sharding_type = sharding_infos[0].param_sharding.sharding_type
        is_data_parallel = sharding_type == ShardingType.DATA_PARALLEL.value
        if not is_data_parallel:
            # Every rank sees every table here, while kernels are built on their own rank only.
            for info in sharding_infos:
                if info.embedding_config.name in specs:
                    FusedOptimizerParams.from_fused_params(
                        info.fused_params, info.embedding_config.name
                    )
            if device is not None and device.type == "cpu":
                refuse_optimizers_without_cpu_kernel(sharding_infos)
        if not specs:
            return super().create_embedding_bag_sharding(
                sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
            )
        if device is not None and device.type == "meta":
            compat.place_on_meta(sharding_infos)
        if is_data_parallel:
            return FlowTTDpPooledEmbeddingSharding(sharding_infos, env, device)
        return FlowTTTwPooledEmbeddingSharding(
            sharding_infos,
            env,
            device,
            qcomm_codecs_registry=qcomm_codecs_registry,
        )

    # -- parameters and state ------------------------------------------------------------------

    def _tt_kernels(self) -> list[FlowTTEmbeddingBagKernel]:
        return [
            kernel
            for lookup in compat.unwrapped_lookups(self)
            for kernel in compat.embedding_kernels(lookup)
            if isinstance(kernel, FlowTTEmbeddingBagKernel)
        ]

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        super()._initialize_torch_state(skip_registering)
        env = compat.sharding_env(self)
        cores_here = {
            table: cores
            for kernel in self._tt_kernels()
            for table, cores in kernel.tt_cores_by_table().items()
        }
        self._distributed_cores: dict[str, Any] = {}
        self._owns_core: dict[str, bool] = {}
        for config in self._all_configs():
            if not isinstance(config, FlowTTEmbeddingBagConfig):
                continue
            sharding = self.module_sharding_plan[config.name]
            cores = cores_here.get(config.name)
            registered = [
                cores[k] if cores is not None else nn.Parameter(torch.empty(0))
                for k in range(config.tt_spec.num_cores)
            ]
            self.embedding_bags[config.name].tt_cores = nn.ParameterList(registered)
            if sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
                continue
            self._register_distributed_cores(
                config, registered, cores is not None, core_placement(sharding, env)
            )
        if not skip_registering:
            compat.register_state_hooks(self, _distribute_cores, _localise_cores)

    def _register_distributed_cores(
        self,
        config: FlowTTEmbeddingBagConfig,
        registered: list[nn.Parameter],
        owned: bool,
        placement: CorePlacement,
    ) -> None:
        for k, (parameter, shape) in enumerate(
            zip(registered, config.tt_spec.core_shapes, strict=True)
        ):
            mark_in_backward(parameter)
            key = f"embedding_bags.{config.name}.tt_cores.{k}"
            self._owns_core[key] = owned
            self._distributed_cores[key] = placement.distribute(
                shape, config.dtype, parameter.detach() if owned else None
            )

    def reset_parameters(self) -> None:
        """Initialise every table by its configuration, the same on all ranks if data-parallel."""
        tt_tables = set(self._tt_tables())
        with compat.restricted_to(self, lambda config: config.name not in tt_tables):
            super().reset_parameters()
        device = compat.compute_device(self)
        if device is not None and device.type == "meta":
            return
        group = compat.sharding_env(self).process_group
        for kernel in self._tt_kernels():
            kernel.reset_parameters()
            for table, cores in kernel.tt_cores_by_table().items():
                sharding = none_throws(self.module_sharding_plan[table])
                if sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
                    for core in cores:
                        dist.broadcast(core.data, src=0, group=group)

    def update_shards(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to move tables between ranks while training.

        Raises:
            NotImplementedError: always; TorchRec rebuilds every lookup and would lose the cores.
        """
        raise NotImplementedError(
            f"dynamic resharding of a collection with TT tables {self._tt_tables()} is not "
            "supported: save a checkpoint with torch.distributed.checkpoint and load it under "
            "the new plan"
        )

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """The module this was sharded from."""
        return FlowTTEmbeddingBagCollection


def _distribute_cores(
    module: ShardedFlowTTEmbeddingBagCollection,
    destination: dict[str, Any],
    prefix: str,
    _local_metadata: dict[str, Any],
) -> None:
    for key, core in module._distributed_cores.items():
        destination[prefix + key] = core


def _localise_cores(
    module: ShardedFlowTTEmbeddingBagCollection,
    state_dict: dict[str, Any],
    prefix: str,
    *_: Any,
) -> None:
    for key, owned in module._owns_core.items():
        if prefix + key in state_dict:
            state_dict[prefix + key] = local_core(state_dict[prefix + key], owned, prefix + key)
