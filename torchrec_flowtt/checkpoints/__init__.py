"""Tables in checkpoints: decomposed into TT-cores, reconstructed from them, imported."""

from __future__ import annotations

from torchrec_flowtt.checkpoints.tables import (
    ConvertedTable,
    Outcome,
    decompose_checkpoint,
    import_tt_rec,
    reconstruct_checkpoint,
)

__all__ = [
    "ConvertedTable",
    "Outcome",
    "decompose_checkpoint",
    "import_tt_rec",
    "reconstruct_checkpoint",
]
