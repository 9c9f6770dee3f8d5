"""TT-cores in the layout of TT-Rec's ``TTEmbeddingBag`` and ``TableBatchedTTEmbeddingBag``.

TT-Rec (Yin et al., MLSys 2021; FBTT-Embedding) has one parameter ``tt_cores.<k>`` for all T tables,
``[T, p_k, r_(k-1) * q_k * r_k]``. The last dimension is ``[r_(k-1), q_k, r_k]`` in row-major order,
and rows and columns are numbered with the first factor as the most significant, as here. So a core
is a view of theirs, once ranks and column factors are known. Its first version had one table a
module, and cores ``[p_k, r_(k-1) * q_k * r_k]``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchrec_flowtt.functional.cores import check_cores, checked_num_embeddings
from torchrec_flowtt.shapes.arguments import positive_integers

__all__ = ["cores_from_tt_rec"]


def cores_from_tt_rec(
    cores: Sequence[Tensor],
    tt_ranks: Sequence[int],
    *,
    table: int = 0,
    num_embeddings: int | None = None,
) -> list[Tensor]:
    """The TT-cores of one table of a TT-Rec module.

    Args:
        cores: the module's ``tt_cores``, each ``[T, p_k, r_(k-1) * q_k * r_k]``, or without the T.
        tt_ranks: inner ranks ``r_1 .. r_(d-1)``, the module's argument of this name; they decide
            the column factors.
        table: which of the T tables.
        num_embeddings: N, to check that the cores can represent as many rows.

    Returns:
        Contiguous copies, ``[p_k, r_(k-1), q_k, r_k]``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the ranks do not fit the cores, or an argument is out of range.

    >>> import torch
    >>> theirs = torch.rand(1, 5, 2 * 3), torch.rand(1, 6, 3 * 4)  # q = (2, 4), one rank of 3
    >>> [tuple(core.shape) for core in cores_from_tt_rec(theirs, [3])]
    [(5, 1, 2, 3), (6, 3, 4, 1)]
    """
    inner = positive_integers(tt_ranks, "tt_ranks", "TT-Rec cores")
    if len(inner) != len(cores) - 1:
        raise ValueError(
            f"tt_ranks must have {len(cores) - 1} inner ranks for {len(cores)} cores, got "
            f"{len(inner)}: {inner}"
        )
    ranks = (1, *inner, 1)
    views = []
    for k, core in enumerate(cores):
        if core.dim() == 2:
            core = core.unsqueeze(0)
        if core.dim() != 3:
            raise ValueError(
                f"cores[{k}] must have shape [T, p, r_in * q * r_out], got {tuple(core.shape)}"
            )
        if not 0 <= table < core.shape[0]:
            raise ValueError(
                f"table must be 0 to {core.shape[0] - 1}, as cores[{k}] has {core.shape[0]} "
                f"tables, got {table}"
            )
        bonds = ranks[k] * ranks[k + 1]
        if core.shape[2] == 0 or core.shape[2] % bonds:
            raise ValueError(
                f"cores[{k}] must have a multiple of {ranks[k]} * {ranks[k + 1]} elements a slice, "
                f"as tt_ranks are {inner}, got {core.shape[2]}"
            )
        view = core.detach()[table].reshape(core.shape[1], ranks[k], -1, ranks[k + 1])
        views.append(view.clone())
    check_cores(views)
    checked_num_embeddings(views, num_embeddings)
    return views
