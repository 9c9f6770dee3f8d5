"""Rows of a TT table, looked up as `torch.nn.functional.embedding` does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_flowtt.functional.cores import check_cores, checked_num_embeddings
from torchrec_flowtt.functional.embedding_bag import (
    batched_lookup,
    check_integers,
    checked_output_dtype,
)
from torchrec_flowtt.functional.lookup import BatchedLookup
from torchrec_flowtt.functional.packed_cores import PackedCores
from torchrec_flowtt.functional.pooling import PoolingMode

__all__ = ["tt_embedding"]


def tt_embedding(
    indices: Tensor,
    cores: Sequence[Tensor],
    *,
    num_embeddings: int | None = None,
    output_dtype: torch.dtype | None = None,
    packed: PackedCores | None = None,
) -> Tensor:
    """Rows of one TT table, without reconstructing the table.

    The result is that of :func:`rows`, but it comes from the compiled kernels, its gradients too.
    Of the arguments of `torch.nn.functional.embedding`, ``padding_idx``, ``max_norm``,
    ``scale_grad_by_freq`` and ``sparse`` have no counterpart.

    Args:
        indices: row indices of any shape, int32 or int64.
        cores: TT-cores ``[p_k, r_(k-1), q_k, r_k]`` of one dtype: float32, float16, bfloat16 or
            float64. Differentiable, once.
        num_embeddings: N, rows of the table; default all that the cores can represent.
        output_dtype: dtype of the result; default the cores'. float64 for float64 cores only.
        packed: what keeps packed copies of `cores` for lookups without a gradient on CUDA.

    Returns:
        ``[*, D]``, with the shape of `indices` in place of ``*``.

    Raises:
        TypeError: a dtype does not fit, or N is no integer.
        ValueError: a shape, N or a device does not fit.
        IndexError: an index is outside ``[0, N)``; on CUDA the kernel reports it and stops.

    >>> g1, g2 = torch.rand(2, 1, 3, 2), torch.rand(4, 2, 2, 1)
    >>> tt_embedding(torch.tensor([[1, 5], [5, 0]]), [g1, g2]).shape
    torch.Size([2, 2, 6])
    """
    check_cores(cores)
    check_integers(indices, "indices")
    flat = indices.reshape(-1)
    lookup = BatchedLookup(
        cores_per_table=[len(cores)],
        num_embeddings=[checked_num_embeddings(cores, num_embeddings)],
        feature_table_map=[0],
        pooling_mode=int(PoolingMode.NONE),
        output_dtype=checked_output_dtype(output_dtype, cores[0].dtype),
    )
    # One bag with all indices. Computed on the device: no copy has to wait for the other side.
    offsets = torch.arange(2, device=indices.device) * flat.numel()
    output = batched_lookup(flat, offsets, None, cores, lookup, packed=packed)
    return output.reshape(*indices.shape, output.shape[1])
