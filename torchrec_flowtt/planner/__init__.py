"""Sharding plans for models with TT tables."""

from __future__ import annotations

from torchrec_flowtt.planner.enumerator import FlowTTEmbeddingEnumerator
from torchrec_flowtt.planner.lookup_cost import ArithmeticRate, TTLookupCost
from torchrec_flowtt.planner.placement import PlacementRow
from torchrec_flowtt.planner.planner import FlowTTEmbeddingShardingPlanner
from torchrec_flowtt.planner.shadow_estimators import ShadowEstimator
from torchrec_flowtt.planner.stats import FlowTTEmbeddingStats

__all__ = [
    "ArithmeticRate",
    "FlowTTEmbeddingEnumerator",
    "FlowTTEmbeddingShardingPlanner",
    "FlowTTEmbeddingStats",
    "PlacementRow",
    "ShadowEstimator",
    "TTLookupCost",
]
