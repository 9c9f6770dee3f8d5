"""What the sharded collections with TT tables share, pooled and sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_flowtt.distributed import compat
from torchrec_flowtt.distributed.batch_forms import for_exchange
from torchrec_flowtt.distributed.batch_requirements import BatchRequirements
from torchrec_flowtt.distributed.core_states import CorePlacement, local_core
from torchrec_flowtt.distributed.cpu_optimizers import refuse_optimizers_without_cpu_kernel
from torchrec_flowtt.distributed.embedding_configs import TTTableConfig
from torchrec_flowtt.distributed.exchanged_dtypes import ExchangedDtypes
from torchrec_flowtt.distributed.fused_optimizer import (
    RemoteTable,
    RemoteTablesOptimizer,
    StatefulCombinedOptimizer,
    mark_in_backward,
)
from torchrec_flowtt.distributed.fused_params import FusedOptimizerParams
from torchrec_flowtt.distributed.kernels import FlowTTEmbeddingBagKernel
from torchrec_flowtt.distributed.sharding import core_placement, tt_specs_of
from torchrec_flowtt.distributed.table_parameters import tt_spec_of


def validate_optimizers(
    sharding_infos: list[EmbeddingShardingInfo], device: torch.device | None
) -> None:
    """Checks the fused parameters of the tables of one sharding type, those of all ranks.

    Raises:
        ValueError: if a TT table has fused parameters that TT tables cannot honour, or an
            uncompressed one a fused optimizer that FBGEMM does not have on the CPU.
    """
    if sharding_infos[0].param_sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
        return
    # Every rank sees every table here, while kernels are built on their own rank only.
    for name in tt_specs_of(sharding_infos):
        for info in sharding_infos:
            if info.embedding_config.name == name:
                FusedOptimizerParams.from_fused_params(info.fused_params, name)
    if device is not None and device.type == "cpu":
        refuse_optimizers_without_cpu_kernel(sharding_infos)


class ShardedTTTables:
    """TT tables of a sharded collection of TorchRec, its other base class.

    Attributes:
        TABLES: name of the attribute that holds the tables, as in state dicts.
    """

    TABLES: ClassVar[str]

    sharding_type_to_sharding_infos: dict[str, list[EmbeddingShardingInfo]]
    module_sharding_plan: EmbeddingModuleShardingPlan

    def _prepare_batches(
        self,
        requirements: BatchRequirements,
        exchanges_weights: bool,
        plan: Mapping[str, ParameterSharding],
        env: ShardingEnv,
    ) -> None:
        """Sets up the checks of batches; for the constructor."""
        self._batch_requirements = requirements
        self._exchanges_weights = exchanges_weights
        self._first_keys: list[str] | None = None
        exchanges = env.process_group is not None and any(
            sharding.sharding_type != ShardingType.DATA_PARALLEL.value for sharding in plan.values()
        )
        self._exchanged_dtypes = (
            ExchangedDtypes(env.process_group, requirements.label) if exchanges else None
        )

    def _combine_optimizers(self, table_wise: Iterable[EmbeddingShardingInfo]) -> None:
        """Adds the tables of other ranks to the fused optimizers; for the constructor."""
        optimizers = compat.fused_optimizers(self._module)
        remote = self._remote_tables(table_wise)
        if remote:
            optimizers.append(("", RemoteTablesOptimizer(remote, f"{self.TABLES}.")))
        self._stateful_optimizer = StatefulCombinedOptimizer(optimizers)

    @property
    def _module(self) -> nn.Module:
        return cast(nn.Module, self)

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Any:
        """Starts to send the features of a batch to the ranks of their tables.

        Raises:
            KeyError: a feature is not among the keys.
            TypeError, ValueError: something else is wrong with the batch, as far as this rank can
                see without reading its tensors.
        """
        if isinstance(features, KeyedJaggedTensor):
            self._batch_requirements.check_form(features, self._first_keys)
            features = for_exchange(features, self._exchanges_weights)
        try:
            if isinstance(features, KeyedJaggedTensor):
                # On a GPU only an exchange reads the lengths anyway.
                if self._exchanged_dtypes is not None or features.values().device.type == "cpu":
                    self._batch_requirements.check_lengths(features)
                if self._exchanged_dtypes is not None:
                    self._exchanged_dtypes.check(features)
            distributed = super().input_dist(ctx, features)  # type: ignore[misc]
        except Exception as error:
            self._batch_requirements.explain(features, error)
            raise
        if self._first_keys is None and isinstance(features, KeyedJaggedTensor):
            self._first_keys = list(features.keys())
        return distributed

    def _remote_tables(self, table_wise: Iterable[EmbeddingShardingInfo]) -> dict[str, RemoteTable]:
        env = compat.sharding_env(self._module)
        if env.process_group is None:
            return {}
        here = {table for kernel in self._tt_kernels() for table in kernel.tables}
        remote = {}
        for info in table_wise:
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

    def _all_configs(self) -> list[Any]:
        return list(compat.table_configs(self._module))

    def _tt_tables(self) -> list[str]:
        return [c.name for c in self._all_configs() if isinstance(c, TTTableConfig)]

    # -- parameters and state ------------------------------------------------------------------

    def _tt_kernels(self) -> list[FlowTTEmbeddingBagKernel]:
        return [
            kernel
            for lookup in compat.unwrapped_lookups(self._module)
            for kernel in compat.embedding_kernels(lookup)
            if isinstance(kernel, FlowTTEmbeddingBagKernel)
        ]

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        # TorchRec 1.6 passes the argument to the pooled collection alone.
        arguments = (True,) if skip_registering else ()
        super()._initialize_torch_state(*arguments)  # type: ignore[misc]
        env = compat.sharding_env(self._module)
        cores_here = {
            table: cores
            for kernel in self._tt_kernels()
            for table, cores in kernel.tt_cores_by_table().items()
        }
        tables = getattr(self, self.TABLES)
        self._distributed_cores: dict[str, Any] = {}
        self._owns_core: dict[str, bool] = {}
        for config in self._all_configs():
            if not isinstance(config, TTTableConfig):
                continue
            sharding = self.module_sharding_plan[config.name]
            cores = cores_here.get(config.name)
            registered = [
                cores[k] if cores is not None else nn.Parameter(torch.empty(0))
                for k in range(config.tt_spec.num_cores)
            ]
            tables[config.name].tt_cores = nn.ParameterList(registered)
            if sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
                continue
            self._register_distributed_cores(
                config, registered, cores is not None, core_placement(sharding, env)
            )
        if not skip_registering:
            compat.register_state_hooks(self._module, _distribute_cores, _localise_cores)

    def _register_distributed_cores(
        self,
        config: TTTableConfig,
        registered: list[nn.Parameter],
        owned: bool,
        placement: CorePlacement,
    ) -> None:
        for k, (parameter, shape) in enumerate(
            zip(registered, config.tt_spec.core_shapes, strict=True)
        ):
            mark_in_backward(parameter)
            key = f"{self.TABLES}.{config.name}.tt_cores.{k}"
            self._owns_core[key] = owned
            self._distributed_cores[key] = placement.distribute(
                shape, config.dtype, parameter.detach() if owned else None
            )

    def reset_parameters(self) -> None:
        """Initialise every table by its configuration, the same on all ranks if data-parallel."""
        tt_tables = set(self._tt_tables())
        with compat.restricted_to(self._module, lambda config: config.name not in tt_tables):
            super().reset_parameters()  # type: ignore[misc]
        device = compat.compute_device(self._module)
        if device is not None and device.type == "meta":
            return
        group = compat.sharding_env(self._module).process_group
        for kernel in self._tt_kernels():
            kernel.reset_parameters()
            for table, cores in kernel.tt_cores_by_table().items():
                sharding = self.module_sharding_plan[table]
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


def _distribute_cores(
    module: ShardedTTTables,
    destination: dict[str, Any],
    prefix: str,
    _local_metadata: dict[str, Any],
) -> None:
    for key, core in module._distributed_cores.items():
        destination[prefix + key] = core


def _localise_cores(
    module: ShardedTTTables,
    state_dict: dict[str, Any],
    prefix: str,
    *_: Any,
) -> None:
    for table in module._tt_tables():
        # What the collection that is being sharded has in place of a weight; see the views.
        weight = state_dict.get(f"{prefix}{module.TABLES}.{table}.weight")
        if isinstance(weight, torch.Tensor) and weight.is_meta:
            del state_dict[f"{prefix}{module.TABLES}.{table}.weight"]
    for key, owned in module._owns_core.items():
        if prefix + key in state_dict:
            state_dict[prefix + key] = local_core(state_dict[prefix + key], owned, prefix + key)
