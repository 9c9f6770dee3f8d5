"""Sharding plans for models with TT tables."""

from __future__ import annotations

from torchrec_flowtt.versions import require_torchrec

require_torchrec()

from torchrec_flowtt.planner.calibration import Calibration  # noqa: E402
from torchrec_flowtt.planner.enumerator import FlowTTEmbeddingEnumerator  # noqa: E402
from torchrec_flowtt.planner.lookup_cost import ArithmeticRate, LookupLoad, TTLookupCost  # noqa: E402
from torchrec_flowtt.planner.placement import PlacementRow  # noqa: E402
from torchrec_flowtt.planner.planner import FlowTTEmbeddingShardingPlanner  # noqa: E402
from torchrec_flowtt.planner.shadow_estimators import ShadowEstimator  # noqa: E402
from torchrec_flowtt.planner.stats import FlowTTEmbeddingStats  # noqa: E402

__all__ = [
    "ArithmeticRate",
    "Calibration",
    "FlowTTEmbeddingEnumerator",
    "FlowTTEmbeddingShardingPlanner",
    "FlowTTEmbeddingStats",
    "LookupLoad",
    "PlacementRow",
    "ShadowEstimator",
    "TTLookupCost",
]
