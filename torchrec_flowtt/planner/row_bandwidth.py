"""How fast FBGEMM reads uncompressed rows on a card, as TorchRec's estimators count bytes."""

from __future__ import annotations

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from torchrec_flowtt.planner.lookup_measurement import device_ms

_ROWS, _COLUMNS, _LOOKUPS = 10_000_000, 128, 65_536


def fbgemm_bytes_per_ms(device: torch.device) -> float | None:
    """Bytes of indices, rows and output that a lookup of a large table moves in a millisecond.

    It is meant as ``hbm_mem_bw`` of TorchRec's ``Topology``, whose default is an older card's.

    Args:
        device: a GPU with 6 GB to spare; None is returned of another device.
    """
    if device.type != "cuda":
        return None
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(_ROWS, _COLUMNS, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)],
        device=torch.device("cuda", torch.cuda.current_device()),
    )
    indices = torch.randint(_ROWS, (_LOOKUPS,), device=device)
    offsets = torch.arange(_LOOKUPS + 1, device=device)

    def lookup() -> None:
        with torch.no_grad():
            table(indices, offsets)

    index_bytes, row_bytes = indices.itemsize, _COLUMNS * 4
    return _LOOKUPS * (index_bytes + 2 * row_bytes) / device_ms(lookup, device)
