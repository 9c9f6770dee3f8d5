"""Which quantised module takes the place of which."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.inference.modules import (
    DEFAULT_QUANT_MAPPING,
    trim_torch_package_prefix_from_typename,
)

from torchrec_flowtt.distributed import FlowTTEmbeddingBagCollection
from torchrec_flowtt.inference.quant_ebc import QuantFlowTTEmbeddingBagCollection

__all__ = ["flowtt_quantization_mapping"]


def flowtt_quantization_mapping() -> dict[str, type[nn.Module]]:
    """The complete ``quantization_mapping`` for ``quantize_inference_model``.

    TorchRec's own, and :class:`QuantFlowTTEmbeddingBagCollection` for collections with TT tables.
    Without the latter ``quantize_inference_model`` leaves such a collection as it is, its
    uncompressed tables too, and says nothing.

    Returns:
        Type names to quantised modules, a new dictionary.

    >>> for name in sorted(flowtt_quantization_mapping()):
    ...     print(name)
    torchrec.modules.embedding_modules.EmbeddingBagCollection
    torchrec.modules.embedding_modules.EmbeddingCollection
    torchrec_flowtt.distributed.ebc.FlowTTEmbeddingBagCollection
    """
    name = trim_torch_package_prefix_from_typename(torch.typename(FlowTTEmbeddingBagCollection))
    return {**DEFAULT_QUANT_MAPPING, name: QuantFlowTTEmbeddingBagCollection}
