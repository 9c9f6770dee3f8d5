"""Shapes of Tensor-Train compressed embedding tables: what they are and how to choose them."""

from __future__ import annotations

from torchrec_flowtt.shapes.factorization import cover, factorize
from torchrec_flowtt.shapes.spec import TTSpec

__all__ = ["TTSpec", "cover", "factorize"]
