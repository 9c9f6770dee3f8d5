"""What a list of TT-core tensors must look like."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_flowtt.shapes.arguments import checked_integer

__all__ = [
    "CORE_DTYPES",
    "accumulation_dtype",
    "check_cores",
    "checked_num_embeddings",
    "embedding_dim",
    "padded_num_embeddings",
]

#: What TT-cores may consist of.
CORE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type in which products of cores of `dtype` are summed: float64 for float64, else float32.

    >>> accumulation_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_cores(cores: Sequence[Tensor], argument: str = "cores") -> None:
    """Checks that `cores` are the TT-cores of one table.

    Args:
        cores: 2 to 4 tensors ``[p_k, r_(k-1), q_k, r_k]`` of one floating dtype on one device,
            with ``r_0 = r_d = 1``.
        argument: what messages call `cores`.

    Raises:
        TypeError: an element is no floating-point tensor, or dtypes differ.
        ValueError: the number of cores, a shape, a rank or a device does not fit.
    """
    if not isinstance(cores, Sequence):
        raise TypeError(
            f"{argument} must be a sequence of tensors, one a core, got {type(cores).__name__}"
        )
    if not 2 <= len(cores) <= 4:
        raise ValueError(f"{argument} must hold 2 to 4 TT-cores, got {len(cores)}")
    rank = 1
    for k, core in enumerate(cores):
        if not isinstance(core, Tensor):
            raise TypeError(f"{argument}[{k}] must be a Tensor, got {type(core).__name__}")
        if core.dtype not in CORE_DTYPES:
            names = ", ".join(str(dtype) for dtype in CORE_DTYPES)
            raise TypeError(f"{argument}[{k}] must be one of {names}, got {core.dtype}")
        if core.dtype != cores[0].dtype:
            raise TypeError(
                f"{argument}[{k}] must have the dtype of all cores, "
                f"got {core.dtype} beside {cores[0].dtype}"
            )
        if core.device != cores[0].device:
            raise ValueError(
                f"{argument}[{k}] must be on {cores[0].device} like the first core, "
                f"got {core.device}"
            )
        if core.dim() != 4:
            raise ValueError(
                f"{argument}[{k}] must have shape [p, r_in, q, r_out], got {tuple(core.shape)}"
            )
        if core.shape[1] != rank:
            raise ValueError(
                f"{argument}[{k}] must have rank {rank} in dimension 1, "
                f"{'the last of the previous core' if k else 'as first core'}, "
                f"got shape {tuple(core.shape)}"
            )
        rank = core.shape[3]
    if rank != 1:
        raise ValueError(
            f"{argument}[{len(cores) - 1}] must have rank 1 in dimension 3, as last core, "
            f"got shape {tuple(cores[-1].shape)}"
        )


def padded_num_embeddings(cores: Sequence[Tensor]) -> int:
    """Rows that the cores can represent, the product of their first dimensions."""
    padded = 1
    for core in cores:  # a loop, as torch.compile cannot trace math.prod
        padded *= core.shape[0]
    return padded


def embedding_dim(cores: Sequence[Tensor]) -> int:
    """D, columns of the table: the product of the cores' third dimensions."""
    columns = 1
    for core in cores:  # as in padded_num_embeddings
        columns *= core.shape[2]
    return columns


def checked_num_embeddings(cores: Sequence[Tensor], num_embeddings: int | None) -> int:
    """N: `num_embeddings`, or all the rows that `cores` can represent where it is None.

    Raises:
        TypeError: `num_embeddings` is no integer.
        ValueError: the cores cannot represent `num_embeddings` rows.

    >>> checked_num_embeddings([torch.rand(2, 1, 3, 2), torch.rand(4, 2, 2, 1)], None)
    8
    """
    padded = padded_num_embeddings(cores)
    if num_embeddings is None:
        return padded
    num_embeddings = checked_integer(num_embeddings, "num_embeddings")
    if not 0 < num_embeddings <= padded:
        raise ValueError(
            f"num_embeddings must be 1 to {padded}, the product of the cores' first dimensions, "
            f"got {num_embeddings}"
        )
    return num_embeddings
