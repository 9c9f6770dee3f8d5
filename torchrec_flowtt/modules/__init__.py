"""Modules that hold TT-cores: one table, or many with an optimizer fused into backward."""

from __future__ import annotations

from torchrec_flowtt.functional.pooling import PoolingMode
from torchrec_flowtt.modules.embedding import FlowTTEmbedding
from torchrec_flowtt.modules.embedding_bag import FlowTTEmbeddingBag
from torchrec_flowtt.modules.initialization import (
    default_variance,
    initialize_tt_cores_,
    second_moment,
)
from torchrec_flowtt.modules.optimizers import OptimizerConfig, OptimType
from torchrec_flowtt.modules.row_wise_adagrad import RowWiseAdagrad
from torchrec_flowtt.modules.table_batched import TableBatchedFlowTTEmbeddingBags

__all__ = [
    "FlowTTEmbedding",
    "FlowTTEmbeddingBag",
    "OptimType",
    "OptimizerConfig",
    "PoolingMode",
    "RowWiseAdagrad",
    "TableBatchedFlowTTEmbeddingBags",
    "default_variance",
    "initialize_tt_cores_",
    "second_moment",
]
