"""The lookup of one sharding type: TT kernels beside TorchRec's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_flowtt.distributed.compat import (
    bind_kernel_arguments,
    embedding_kernels,
    group_embeddings,
)
from torchrec_flowtt.distributed.core_states import CorePlacement
from torchrec_flowtt.distributed.kernels import (
    DenseFlowTTEmbeddingBagKernel,
    FlowTTEmbeddingBagKernel,
    FusedFlowTTEmbeddingBagKernel,
)
from torchrec_flowtt.distributed.variable_batch import merge_groups
from torchrec_flowtt.shapes import TTSpec


class _TTKernels:
    """A TT kernel for every group of TT tables, beside a lookup of TorchRec, the other base class.

    Args:
        tt_specs: TT shapes by table name.
        placements: where table-wise cores are, by table name; ``None`` for data-parallel tables.
        **kwargs: as for TorchRec's lookup.
    """

    def __init__(
        self,
        *,
        tt_specs: Mapping[str, TTSpec],
        placements: Mapping[str, CorePlacement] | None,
        **kwargs: Any,
    ) -> None:
        """Builds it; see the class for the arguments."""
        # The base constructor creates the kernels, so these are set before it runs.
        self._tt_specs = dict(tt_specs)
        self._placements = None if placements is None else dict(placements)
        super().__init__(**kwargs)

    def _create_embedding_kernel(
        self, config: GroupedEmbeddingConfig, *args: Any, **kwargs: Any
    ) -> Any:
        create = super()._create_embedding_kernel  # type: ignore[misc]
        if config.compute_kernel != EmbeddingComputeKernel.CUSTOMIZED_KERNEL:
            return create(config, *args, **kwargs)
        device = bind_kernel_arguments(create, (config, *args), kwargs)["device"]
        if self._placements is None:
            return DenseFlowTTEmbeddingBagKernel(config, self._tt_specs, device)
        return FusedFlowTTEmbeddingBagKernel(config, self._tt_specs, device, self._placements)


class FlowTTGroupedEmbeddingsLookup(_TTKernels, GroupedEmbeddingsLookup):
    """TorchRec's lookup of sequence embeddings, with TT kernels for groups of TT tables."""


class FlowTTGroupedPooledEmbeddingsLookup(_TTKernels, GroupedPooledEmbeddingsLookup):
    """TorchRec's lookup of pooled embeddings, with TT kernels for groups of TT tables."""

    def forward(self, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Pooled embeddings of this rank's tables; see the kernels for the shape."""
        kernels = embedding_kernels(self)
        if (
            len(kernels) < 2
            or not sparse_features.variable_stride_per_key()
            or not any(isinstance(kernel, FlowTTEmbeddingBagKernel) for kernel in kernels)
        ):
            pooled: torch.Tensor = super().forward(sparse_features)
            return pooled
        # TorchRec merges variable batches inside FBGEMM's kernels, which TT kernels do not have.
        groups, embeddings = group_embeddings(self, sparse_features)
        return merge_groups(
            embeddings,
            [group.stride_per_key_per_rank() for group in groups],
            [config.embedding_dims() for config in self.grouped_configs],
        )
