"""Tensor-Train compressed embedding tables for TorchRec.

Importing the package checks the torch version and loads nothing else. Names below are loaded on
first use, so that shapes, operators, functions and modules work without TorchRec or FBGEMM.

>>> import torchrec_flowtt
>>> spec = torchrec_flowtt.TTSpec.suggest(10_000_000, 128, tt_ranks=32)
>>> spec.num_cores
3
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torchrec_flowtt.version import __version__ as __version__
from torchrec_flowtt.versions import require_torch as _require_torch

if TYPE_CHECKING:
    from torchrec_flowtt.distributed import (
        FlowTTEmbeddingBagCollection as FlowTTEmbeddingBagCollection,
    )
    from torchrec_flowtt.distributed import (
        FlowTTEmbeddingBagCollectionSharder as FlowTTEmbeddingBagCollectionSharder,
    )
    from torchrec_flowtt.distributed import (
        FlowTTEmbeddingBagConfig as FlowTTEmbeddingBagConfig,
    )
    from torchrec_flowtt.distributed import (
        FlowTTEmbeddingCollection as FlowTTEmbeddingCollection,
    )
    from torchrec_flowtt.distributed import (
        FlowTTEmbeddingCollectionSharder as FlowTTEmbeddingCollectionSharder,
    )
    from torchrec_flowtt.distributed import (
        FlowTTEmbeddingConfig as FlowTTEmbeddingConfig,
    )
    from torchrec_flowtt.modules import FlowTTEmbedding as FlowTTEmbedding
    from torchrec_flowtt.modules import FlowTTEmbeddingBag as FlowTTEmbeddingBag
    from torchrec_flowtt.modules import (
        TableBatchedFlowTTEmbeddingBags as TableBatchedFlowTTEmbeddingBags,
    )
    from torchrec_flowtt.planner import (
        FlowTTEmbeddingShardingPlanner as FlowTTEmbeddingShardingPlanner,
    )
    from torchrec_flowtt.shapes import TTSpec as TTSpec

_require_torch()

_LAZY = {
    "TTSpec": "torchrec_flowtt.shapes",
    "FlowTTEmbedding": "torchrec_flowtt.modules",
    "FlowTTEmbeddingBag": "torchrec_flowtt.modules",
    "TableBatchedFlowTTEmbeddingBags": "torchrec_flowtt.modules",
    "FlowTTEmbeddingBagConfig": "torchrec_flowtt.distributed",
    "FlowTTEmbeddingBagCollection": "torchrec_flowtt.distributed",
    "FlowTTEmbeddingBagCollectionSharder": "torchrec_flowtt.distributed",
    "FlowTTEmbeddingConfig": "torchrec_flowtt.distributed",
    "FlowTTEmbeddingCollection": "torchrec_flowtt.distributed",
    "FlowTTEmbeddingCollectionSharder": "torchrec_flowtt.distributed",
    "FlowTTEmbeddingShardingPlanner": "torchrec_flowtt.planner",
}

__all__ = ["__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
