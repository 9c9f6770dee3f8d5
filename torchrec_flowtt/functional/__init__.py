"""Functions on TT-cores: lookups and their dense reference."""

from __future__ import annotations

from torchrec_flowtt.functional.dense import rows, to_dense
from torchrec_flowtt.functional.embedding import tt_embedding
from torchrec_flowtt.functional.embedding_bag import (
    table_batched_tt_embedding_bag,
    tt_embedding_bag,
)
from torchrec_flowtt.functional.fused_update import FusedUpdate
from torchrec_flowtt.functional.packed_cores import PackedCores
from torchrec_flowtt.functional.pooling import PoolingMode

__all__ = [
    "FusedUpdate",
    "PackedCores",
    "PoolingMode",
    "rows",
    "table_batched_tt_embedding_bag",
    "to_dense",
    "tt_embedding",
    "tt_embedding_bag",
]
