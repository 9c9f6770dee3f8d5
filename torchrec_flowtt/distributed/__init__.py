"""TT tables in TorchRec: configurations, collections, sharder."""

from __future__ import annotations

from torchrec_flowtt.versions import require_torchrec

require_torchrec()

from torchrec_flowtt.distributed import compat  # noqa: E402

compat.check_torchrec()

from torchrec_flowtt.distributed.ebc import FlowTTEmbeddingBagCollection  # noqa: E402
from torchrec_flowtt.distributed.ec import FlowTTEmbeddingCollection  # noqa: E402
from torchrec_flowtt.distributed.embedding_configs import (  # noqa: E402
    FlowTTEmbeddingBagConfig,
    FlowTTEmbeddingConfig,
)
from torchrec_flowtt.distributed.feature_processed import (  # noqa: E402
    FlowTTFeatureProcessedEmbeddingBagCollectionSharder,
)
from torchrec_flowtt.distributed.sharded_ebc import (  # noqa: E402
    ShardedFlowTTEmbeddingBagCollection,
)
from torchrec_flowtt.distributed.sharded_ec import (  # noqa: E402
    ShardedFlowTTEmbeddingCollection,
)
from torchrec_flowtt.distributed.sharder import (  # noqa: E402
    FlowTTEmbeddingBagCollectionSharder,
    FlowTTEmbeddingCollectionSharder,
)

__all__ = [
    "FlowTTEmbeddingBagCollection",
    "FlowTTEmbeddingBagCollectionSharder",
    "FlowTTEmbeddingBagConfig",
    "FlowTTEmbeddingCollection",
    "FlowTTEmbeddingCollectionSharder",
    "FlowTTEmbeddingConfig",
    "FlowTTFeatureProcessedEmbeddingBagCollectionSharder",
    "ShardedFlowTTEmbeddingBagCollection",
    "ShardedFlowTTEmbeddingCollection",
]
