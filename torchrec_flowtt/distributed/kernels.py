"""Embedding kernels: one table-batched TT module for each group of TT tables on a rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.modules.embedding_configs import PoolingType, data_type_to_dtype
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_flowtt.distributed.core_states import CorePlacement
from torchrec_flowtt.distributed.embedding_configs import init_variance
from torchrec_flowtt.distributed.fused_optimizer import FlowTTFusedOptimizer
from torchrec_flowtt.distributed.fused_params import FusedOptimizerParams
from torchrec_flowtt.distributed.variable_batch import equal_batch_offsets, rank_major
from torchrec_flowtt.functional import PoolingMode
from torchrec_flowtt.modules import OptimizerConfig, OptimType, TableBatchedFlowTTEmbeddingBags
from torchrec_flowtt.shapes import TTSpec

_POOLING_MODES = {
    PoolingType.SUM: PoolingMode.SUM,
    PoolingType.MEAN: PoolingMode.MEAN,
    PoolingType.NONE: PoolingMode.NONE,
}


class FlowTTEmbeddingBagKernel(BaseEmbedding):
    """Lookups of a group of TT tables, pooled or not, as one autograd node.

    A group has one data type, pooling and set of fused parameters. However many features a table
    has, they are looked up in the same call, so an optimizer fused into backward steps once a
    batch on the summed gradient.

    Args:
        config: the group, as TorchRec made it.
        tt_specs: TT shapes by table name.
        device: where the cores live.
        params: the optimizer; ``OptimType.NONE`` trains through dense gradients.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        tt_specs: Mapping[str, TTSpec],
        device: torch.device | None,
        params: FusedOptimizerParams,
    ) -> None:
        """Builds it; see the class for the arguments."""
        super().__init__()
        self._config = config
        self.tables: list[str] = [table.name for table in config.embedding_tables]
        self._emb_module = TableBatchedFlowTTEmbeddingBags(
            [tt_specs[table] for table in self.tables],
            feature_table_map=[
                index
                for index, table in enumerate(config.embedding_tables)
                for _ in range(table.num_features())
            ],
            pooling_mode=_POOLING_MODES[config.pooling],
            **dataclasses.asdict(params.config),
            weights_precision=data_type_to_dtype(config.data_type),
            output_dtype=params.output_dtype,
            device=device,
            init_variances=[init_variance(table) for table in config.embedding_tables],
            feature_names=config.feature_names(),
        )

    @property
    def config(self) -> GroupedEmbeddingConfig:
        """The group's configuration."""
        return self._config

    @property
    def emb_module(self) -> TableBatchedFlowTTEmbeddingBags:
        """The table-batched TT module."""
        return self._emb_module

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Embeddings of the group's features.

        Returns:
            Without pooling ``[nnz, D]``, a row for each value. Else ``[B, sum_f D_f]``; with a
            batch size of its own for every feature (and rank the features came from), a flat
            tensor: rank after rank, in it feature after feature, as FBGEMM's kernels return it.
        """
        weights = features.weights_or_none() if self._config.is_weighted else None
        if not features.variable_stride_per_key():
            pooled: torch.Tensor = self._emb_module(features.values(), features.offsets(), weights)
            return pooled
        strides = features.stride_per_key_per_rank()
        offsets = equal_batch_offsets(features.offsets(), [sum(stride) for stride in strides])
        pooled = self._emb_module(features.values(), offsets, weights)
        if self._config.pooling == PoolingType.NONE:
            return pooled
        return rank_major(pooled, strides, self._config.embedding_dims())

    def tt_cores_by_table(self) -> dict[str, list[nn.Parameter]]:
        """The TT-cores of every table of the group."""
        return dict(zip(self.tables, self._emb_module.split_tt_cores(), strict=True))

    def reset_parameters(self) -> None:
        """Initialise the cores."""
        self._emb_module.init_parameters()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Cores as ``<table>.tt_cores.<k>``."""
        start = prefix + "." if prefix else ""
        for table, cores in self.tt_cores_by_table().items():
            for k, core in enumerate(cores):
                yield f"{start}{table}.tt_cores.{k}", core

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Nothing: optimizer states belong to the optimizer's state dict."""
        yield from ()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Nothing: the sharded collection owns the cores' entries."""
        destination = kwargs.get("destination", args[0] if args else None)
        return {} if destination is None else destination

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Nothing: TorchRec would register what this yields as ``<table>.weight``."""
        yield from ()

    def flush(self) -> None:
        """Do nothing; the cores are never cached elsewhere."""

    def purge(self) -> None:
        """Do nothing; the cores are never cached elsewhere."""


class FusedFlowTTEmbeddingBagKernel(FlowTTEmbeddingBagKernel, FusedOptimizerModule):
    """Kernel of table-wise TT tables; the optimizer steps inside the backward pass.

    Args:
        config: the group, as TorchRec made it.
        tt_specs: TT shapes by table name.
        device: where the cores live.
        placements: where the cores are, by table name, for the optimizer's state dict.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        tt_specs: Mapping[str, TTSpec],
        device: torch.device | None,
        placements: Mapping[str, CorePlacement],
    ) -> None:
        """Builds it; see the class for the arguments."""
        tables = [table.name for table in config.embedding_tables]
        params = FusedOptimizerParams.from_fused_params(config.fused_params, tables[0])
        super().__init__(config, tt_specs, device, params)
        self._optim = FlowTTFusedOptimizer(self._emb_module, self.tables, placements)

    @property
    def fused_optimizer(self) -> FlowTTFusedOptimizer:
        """The fused optimizer of the group."""
        return self._optim


class DenseFlowTTEmbeddingBagKernel(FlowTTEmbeddingBagKernel):
    """Kernel of data-parallel TT tables: dense core gradients, reduced by DDP.

    Args:
        config: the group, as TorchRec made it.
        tt_specs: TT shapes by table name.
        device: where the cores live.
    """

    def __init__(
        self,
        config: GroupedEmbeddingConfig,
        tt_specs: Mapping[str, TTSpec],
        device: torch.device | None,
    ) -> None:
        """Builds it; see the class for the arguments."""
        fused = FusedOptimizerParams.from_fused_params(
            {
                name: value
                for name, value in (config.fused_params or {}).items()
                if name == "output_dtype"
            },
            config.embedding_tables[0].name,
        )
        params = FusedOptimizerParams(OptimizerConfig(OptimType.NONE), fused.output_dtype)
        super().__init__(config, tt_specs, device, params)
