"""Serving of models with TT tables: quantisation, and export to programs without Python."""

from __future__ import annotations

from torchrec_flowtt.inference.export import TensorInputs, export_with_dynamic_batch
from torchrec_flowtt.inference.quant_ebc import QuantFlowTTEmbeddingBagCollection
from torchrec_flowtt.inference.quant_mapping import flowtt_quantization_mapping

__all__ = [
    "QuantFlowTTEmbeddingBagCollection",
    "TensorInputs",
    "export_with_dynamic_batch",
    "flowtt_quantization_mapping",
]
