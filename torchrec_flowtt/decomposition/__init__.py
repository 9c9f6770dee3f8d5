"""Uncompressed tables to TT-cores and back, offline."""

from __future__ import annotations

from torchrec_flowtt.decomposition.reconstruction import reconstruct, row_blocks
from torchrec_flowtt.decomposition.tt_rec import cores_from_tt_rec
from torchrec_flowtt.decomposition.tt_svd import TTDecomposition, decompose

__all__ = ["TTDecomposition", "cores_from_tt_rec", "decompose", "reconstruct", "row_blocks"]
