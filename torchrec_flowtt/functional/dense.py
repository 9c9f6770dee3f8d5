"""Rows of a TT table, and the whole of it, in plain torch.

Differentiable any number of times, untouched by autocast, and independent of the compiled
operators; for inspection, export and tests, not for training.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_flowtt.functional.cores import (
    accumulation_dtype,
    check_cores,
    padded_num_embeddings,
)

__all__ = ["rows", "to_dense"]


def to_dense(cores: Sequence[Tensor], num_embeddings: int | None = None) -> Tensor:
    """Reconstructs the uncompressed table.

    Args:
        cores: TT-cores ``[p_k, r_(k-1), q_k, r_k]``, any floating dtype.
        num_embeddings: N, rows to return; default all, ``p_1 * .. * p_d``.

    Returns:
        ``[N, D]`` with D = ``q_1 * .. * q_d``, in the cores' dtype; half-precision cores are
        contracted in float32 and rounded once.

    Raises:
        TypeError: the cores' dtypes do not fit.
        ValueError: the cores' shapes do not fit together, or N is out of range.

    >>> g1, g2 = torch.ones(2, 1, 3, 2), torch.ones(4, 2, 2, 1)
    >>> to_dense([g1, g2], 7).shape
    torch.Size([7, 6])
    """
    check_cores(cores)
    padded = padded_num_embeddings(cores)
    if num_embeddings is None:
        num_embeddings = padded
    if not 0 <= num_embeddings <= padded:
        raise ValueError(
            f"num_embeddings must be 0 to {padded}, the product of the cores' first dimensions, "
            f"got {num_embeddings}"
        )
    dtype = accumulation_dtype(cores[0].dtype)
    table = cores[0].new_ones((1, 1, 1), dtype=dtype)
    for k, core in enumerate(cores):
        with _without_autocast(core.device):
            table = torch.einsum("ijr,prqs->ipjqs", table, core.to(dtype))
        table = table.reshape(
            table.shape[0] * table.shape[1], table.shape[2] * table.shape[3], table.shape[4]
        )
        # Prefixes of padding rows alone are dropped early: p may cover far more than N rows.
        rows_per_prefix = math.prod(later.shape[0] for later in cores[k + 1 :])
        table = table[: -(-num_embeddings // rows_per_prefix)]
    return table.squeeze(-1).to(cores[0].dtype)


def rows(cores: Sequence[Tensor], indices: Tensor) -> Tensor:
    """Reconstructs single rows of a table.

    Args:
        cores: TT-cores ``[p_k, r_(k-1), q_k, r_k]``, any floating dtype.
        indices: row indices, int32 or int64, any shape, each in ``[0, p_1 * .. * p_d)``.

    Returns:
        ``[*indices.shape, D]`` in the cores' dtype, as :func:`to_dense` (``[indices]``).

    Raises:
        TypeError: `indices` is not int32 or int64, or the cores' dtypes do not fit.
        ValueError: the cores' shapes do not fit together.
        IndexError: an index is out of range (on CUDA a device-side assertion).

    >>> g1, g2 = torch.rand(2, 1, 3, 2), torch.rand(4, 2, 2, 1)
    >>> torch.allclose(rows([g1, g2], torch.tensor([5])), to_dense([g1, g2])[5])
    True
    """
    check_cores(cores)
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices must be int32 or int64, got {indices.dtype}")
    dtype = accumulation_dtype(cores[0].dtype)
    flat = indices.reshape(-1).long()
    product = cores[0].new_ones((flat.numel(), 1, 1), dtype=dtype)
    stride = padded_num_embeddings(cores)
    for core in cores:
        # The first digit is left unreduced, so that an index past the end fails the lookup.
        digits = flat // (stride := stride // core.shape[0])
        flat = flat - digits * stride
        slices = core.index_select(0, digits).to(dtype).flatten(2)
        columns = product.shape[1] * core.shape[2]
        with _without_autocast(core.device):
            product = (product @ slices).reshape(flat.numel(), columns, core.shape[3])
    return product.reshape(*indices.shape, product.shape[1]).to(cores[0].dtype)


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Keeps autocast from lowering the precision of a product; meta knows no autocast."""
    if device.type == "meta":
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)
