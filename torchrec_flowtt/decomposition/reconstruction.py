"""The uncompressed table of TT-cores, in blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchrec_flowtt.functional import rows
from torchrec_flowtt.functional.cores import (
    CORE_DTYPES,
    accumulation_dtype,
    check_cores,
    checked_num_embeddings,
    embedding_dim,
)

__all__ = ["reconstruct", "row_blocks"]

_BLOCK_ROWS = 1 << 16


@torch.no_grad()
def row_blocks(
    cores: Sequence[Tensor], num_embeddings: int | None = None, block_rows: int = _BLOCK_ROWS
) -> Iterator[Tensor]:
    """Reconstructs a table from its first row to its last, one block after the other.

    Rows that share all digits but the last share the product of all cores but the last.

    Args:
        cores: TT-cores ``[p_k, r_(k-1), q_k, r_k]``, any floating dtype.
        num_embeddings: N, rows of the table; default all that the cores can represent.
        block_rows: about how many rows a block has; a multiple of ``p_d``, at least one.

    Yields:
        ``[n, D]`` in float32, or float64 for float64 cores.

    Raises:
        TypeError: the cores' dtypes do not fit.
        ValueError: the cores' shapes do not fit together, or N is out of range.

    >>> cores = torch.rand(4, 1, 2, 3), torch.rand(5, 3, 2, 1)
    >>> [tuple(block.shape) for block in row_blocks(cores, 17, block_rows=10)]
    [(10, 4), (7, 4)]
    """
    check_cores(cores)
    total = checked_num_embeddings(cores, num_embeddings)
    dtype = accumulation_dtype(cores[0].dtype)
    *left, last = (core.detach().to(dtype) for core in cores)
    p, rank = last.shape[0], last.shape[1]
    columns = embedding_dim(cores)
    # Closes the chain of the other cores, so that their rows are the products to share.
    identity = torch.eye(rank, dtype=dtype, device=last.device).view(1, rank, rank, 1)
    prefixes = -(-total // p)
    step = max(1, block_rows // p)
    for start in range(0, prefixes, step):
        count = min(step, prefixes - start)
        indices = torch.arange(start, start + count, device=last.device)
        products = rows([*left, identity], indices).view(count, -1, rank)
        block = torch.einsum("nqr,prs->npqs", products, last.squeeze(3)).reshape(-1, columns)
        yield block[: total - start * p]


def reconstruct(
    cores: Sequence[Tensor],
    num_embeddings: int | None = None,
    dtype: torch.dtype | None = None,
    block_rows: int = _BLOCK_ROWS,
) -> Tensor:
    """Reconstructs a table; needs the memory of the result and of one block.

    Args:
        cores: TT-cores ``[p_k, r_(k-1), q_k, r_k]``, any floating dtype.
        num_embeddings: N, rows of the table; default all that the cores can represent.
        dtype: dtype of the result; default the cores'. Products are computed as for
            :func:`row_blocks` and rounded once.
        block_rows: see :func:`row_blocks`.

    Returns:
        ``[N, D]``.

    Raises:
        TypeError: the cores' dtypes do not fit, or `dtype` is none that a table may have.
        ValueError: the cores' shapes do not fit together, N is out of range, or a row does not fit
            `dtype`.

    >>> g1, g2 = torch.ones(2, 1, 3, 2), torch.ones(4, 2, 2, 1)
    >>> reconstruct([g1, g2], 7, torch.float16)[6].tolist()
    [2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    """
    check_cores(cores)
    total = checked_num_embeddings(cores, num_embeddings)
    dtype = cores[0].dtype if dtype is None else dtype
    if dtype not in CORE_DTYPES:
        names = ", ".join(str(valid) for valid in CORE_DTYPES)
        raise TypeError(f"dtype must be one of {names}, got {dtype}")
    table = torch.empty(total, embedding_dim(cores), dtype=dtype, device=cores[0].device)
    start = 0
    for block in row_blocks(cores, total, block_rows):
        part = table[start : start + block.shape[0]]
        part.copy_(block)
        if not bool(part.isfinite().all()) and bool(block.isfinite().all()):
            raise ValueError(
                f"dtype: {dtype} holds at most {torch.finfo(dtype).max:.4g}, got a row of up to "
                f"{block.abs().max().item():.4g}"
            )
        start += block.shape[0]
    return table
