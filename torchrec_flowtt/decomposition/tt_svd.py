"""TT-SVD: the TT-cores that stand for an uncompressed table, or come near it.

The table is unfolded from its last core to its first. The rows of one prefix of digits
``(i_1 .. i_(d-1))`` are next to each other, so the unfolding at the last bond is read in blocks of
rows, and a triangular factor of its size in columns is all that is kept of it. Its leading right
singular vectors are the last core, the table's coefficients in them the smaller table that the next
core is split from. (Oseledets, "Tensor-Train Decomposition", SIAM J. Sci. Comput. 33 (2011),
algorithm 1.)

Rows N and above are padding and may be anything. Prefixes that have such rows only are left out.
The one prefix that has rows of both kinds is *incomplete*: its coefficients are fitted to the rows
that exist, and what the fit says about the others stands in for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_flowtt.decomposition.reconstruction import row_blocks
from torchrec_flowtt.functional.cores import CORE_DTYPES
from torchrec_flowtt.shapes import TTSpec
from torchrec_flowtt.shapes.arguments import table_label

__all__ = ["TTDecomposition", "decompose"]

_BLOCK_ELEMENTS = 1 << 24
_FILLING_STEPS = 10
# Where a step takes no time.
_FEW_COLUMNS, _FILLING_STEPS_OF_FEW_COLUMNS = 128, 200


@dataclass(frozen=True)
class TTDecomposition:
    """TT-cores and how far the table that they stand for is from the one decomposed.

    Attributes:
        cores: ``[p_k, r_(k-1), q_k, r_k]``, of equal root mean squares.
        relative_error: Frobenius norm of the difference over that of the table, over its N rows and
            after the cores are rounded to their dtype; 0 for a table of zeros.
        largest_error: largest magnitude of an entry of the difference.
    """

    cores: list[Tensor]
    relative_error: float
    largest_error: float


@dataclass(frozen=True)
class _Unfolding:
    """What remains to be split: coefficients of the bond to the right of core k.

    Attributes:
        whole: ``[n, q_1 .. q_k, r_k]``, of the n complete prefixes ``(i_1 .. i_k)``.
        basis: ``[r_k, m]``; what exists of the table at the incomplete prefix, which follows the
            complete ones, is ``coefficients @ basis``. None if there is no such prefix.
        target: ``[q_1 .. q_k, m]``, what that should be.
    """

    whole: Tensor
    basis: Tensor | None = None
    target: Tensor | None = None


@torch.no_grad()
def decompose(
    weight: Tensor,
    spec: TTSpec,
    *,
    dtype: torch.dtype | None = None,
    block_rows: int | None = None,
) -> TTDecomposition:
    """Decomposes an uncompressed table into TT-cores of given ranks.

    A table that has TT-cores of these ranks is reproduced to the accuracy of its dtype; any other
    has an error at most ``sqrt(d - 1)`` times that of the best cores, padding aside. All arithmetic
    is in float64, on the table's device.

    Memory beyond the table, in float64 numbers: ``N / p_d * D / q_d * r_(d-1)`` for coefficients,
    at most N D, ``(p_d q_d)^2`` for each of a few triangular factors, and a few blocks.

    Args:
        weight: ``[N, D]``, floating; may be mapped from a file, as it is only read in blocks.
        spec: the TT shape; N and D must be the table's. A rank above the useful one
            (``spec.max_useful_ranks``) is filled with zeros or directions of no weight.
        dtype: dtype of the cores; default the table's.
        block_rows: about how many rows are read at once; default as many as have 2^24 entries.

    Raises:
        TypeError: a dtype is none that cores may have.
        ValueError: the table's shape is not the spec's, or it has an entry that is not finite.

    >>> cores = torch.rand(4, 1, 2, 3), torch.rand(5, 3, 2, 1)
    >>> from torchrec_flowtt.functional import to_dense
    >>> spec = TTSpec(18, 4, p_shapes=(4, 5), q_shapes=(2, 2), tt_ranks=(3,))
    >>> decompose(to_dense(cores, 18), spec).relative_error < 1e-6
    True
    """
    dtype = weight.dtype if dtype is None else dtype
    _check(weight, spec, dtype)
    unfolding = _Unfolding(weight.detach().unsqueeze(2))
    cores: list[Tensor] = []
    # Of singular values in fits: below it, half-precision tables aside, is rounding.
    cutoff = min(100 * torch.finfo(weight.dtype).eps, 1e-3)
    block_rows = block_rows or max(1, _BLOCK_ELEMENTS // spec.embedding_dim)
    for p, rank, q, _ in reversed(spec.core_shapes[1:]):
        core, unfolding = _split(unfolding, p, q, rank, block_rows, cutoff, table_label(spec.name))
        cores.insert(0, core)
        block_rows = -(-block_rows // p)
    cores.insert(0, _first_core(unfolding, spec.p_shapes[0], cutoff))
    cores = [core.to(dtype) for core in _balanced(cores)]
    return TTDecomposition(cores, *_errors(weight, cores))


def _check(weight: Tensor, spec: TTSpec, dtype: torch.dtype) -> None:
    where = table_label(spec.name)
    for what, value in (("weight", weight.dtype), ("cores", dtype)):
        if value not in CORE_DTYPES:
            names = ", ".join(str(valid) for valid in CORE_DTYPES)
            raise TypeError(f"{where}: dtype of the {what} must be one of {names}, got {value}")
    if tuple(weight.shape) != (spec.num_embeddings, spec.embedding_dim):
        raise ValueError(
            f"{where}: weight must have shape [{spec.num_embeddings}, {spec.embedding_dim}], that "
            f"of the spec, got {list(weight.shape)}"
        )


def _split(
    unfolding: _Unfolding,
    p: int,
    q: int,
    rank: int,
    block_rows: int,
    cutoff: float,
    where: str,
) -> tuple[Tensor, _Unfolding]:
    """Splits core ``[p, rank, q, r]`` off; `rank` is that of the bond to its left."""
    whole = unfolding.whole
    groups, children = divmod(whole.shape[0], p)
    r = whole.shape[2]

    def blocks() -> Iterator[Tensor]:
        step = max(1, block_rows // p)
        for start in range(0, groups, step):
            yield _grouped(whole[start * p : min(start + step, groups) * p], p, q)

    factor = whole.new_zeros((0, p * q * r), dtype=torch.float64)
    for block in blocks():
        factor = torch.linalg.qr(torch.cat([factor, block]), mode="r").R
    known = _grouped(whole[groups * p :], children, q) if children else None
    if not all(t.isfinite().all() for t in (factor, known) if t is not None):
        raise ValueError(f"{where}: weight must be finite, got an entry that is infinite or NaN")
    incomplete = known is not None or unfolding.basis is not None
    if incomplete:
        vectors = _filled_vectors(unfolding, factor, known, p, q, rank, cutoff)
    else:
        vectors = _leading_vectors(factor, rank)
    # One row of each product a column prefix: [groups, q_1 .. q_(k-1), rank].
    coefficients = whole.new_empty((groups, whole.shape[1] // q, rank), dtype=torch.float64)
    start = 0
    for block in blocks():
        part = (block @ vectors).view(-1, *coefficients.shape[1:])
        coefficients[start : start + part.shape[0]] = part
        start += part.shape[0]
    core = vectors.view(p, q, r, rank).permute(0, 3, 1, 2).contiguous()
    if not incomplete:
        return core, _Unfolding(coefficients)
    return core, _Unfolding(coefficients, *_observations(unfolding, known, vectors, q))


def _grouped(rows: Tensor, p: int, q: int) -> Tensor:
    """Coefficients ``[groups * p, Q * q, r]`` unfolded: ``[groups * Q, p * q * r]`` in float64."""
    r = rows.shape[2]
    split = rows.to(torch.float64).view(-1, p, rows.shape[1] // q, q, r)
    return split.permute(0, 2, 1, 3, 4).reshape(-1, p * q * r)


def _leading_vectors(matrix: Tensor, count: int) -> Tensor:
    """The first right singular vectors, ``[columns, count]``; zeros beyond as many as there are."""
    full = min(matrix.shape) < count
    vectors = torch.linalg.svd(matrix, full_matrices=full).Vh[:count].T
    return torch.nn.functional.pad(vectors, (0, count - vectors.shape[1]))


def _observations(
    unfolding: _Unfolding, known: Tensor | None, vectors: Tensor, q: int
) -> tuple[Tensor, Tensor]:
    """Basis and target of the incomplete prefix to the left of a core.

    Its complete children have their coefficients, its incomplete child what exists of that one.
    """
    rank = vectors.shape[1]
    r = unfolding.whole.shape[2]
    width = 0 if known is None else known.shape[1]
    bases, targets = [vectors[:width].T], []
    if known is not None:
        targets.append(known)
    if unfolding.basis is not None and unfolding.target is not None:
        child = vectors[width : width + q * r].view(q, r, rank)
        bases.append(torch.einsum("qrs,rm->sqm", child, unfolding.basis).reshape(rank, -1))
        targets.append(unfolding.target.reshape(-1, q * unfolding.target.shape[1]))
    basis, target = torch.cat(bases, dim=1), torch.cat(targets, dim=1)
    if basis.shape[1] > rank:  # the same fit with fewer columns
        orthogonal, triangle = torch.linalg.qr(basis.T)
        return triangle.T, target @ orthogonal
    return basis, target


def _filled_vectors(
    unfolding: _Unfolding,
    factor: Tensor,
    known: Tensor | None,
    p: int,
    q: int,
    rank: int,
    cutoff: float,
) -> Tensor:
    """Leading vectors of the complete prefixes and the incomplete one, whose gaps are filled.

    The vectors and the filling depend on each other and are found in turn. Where the complete
    prefixes alone have vectors enough, those come first: if the table has TT-cores of these
    ranks, they are the ones, and the filling is exact at once.
    """
    prefixes = unfolding.whole.shape[1] // q
    row = factor.new_zeros((prefixes, factor.shape[1]))
    _set_existing(row, unfolding, known, q, cutoff)
    enough = factor.shape[0] >= rank
    vectors = _leading_vectors(factor if enough else torch.cat([factor, row]), rank)
    scale = torch.linalg.norm(torch.cat([factor, row])).item()
    steps = _FILLING_STEPS if row.shape[1] > _FEW_COLUMNS else _FILLING_STEPS_OF_FEW_COLUMNS
    for _ in range(steps):
        basis, target = _observations(unfolding, known, vectors, q)
        filled = _fit(basis, target, cutoff) @ vectors.T
        _set_existing(filled, unfolding, known, q, cutoff)
        change = torch.linalg.norm(filled - row).item()
        row = filled
        vectors = _leading_vectors(torch.cat([factor, row]), rank)
        if change <= cutoff * scale:
            break
    return vectors


def _set_existing(
    row: Tensor, unfolding: _Unfolding, known: Tensor | None, q: int, cutoff: float
) -> None:
    """Puts into the incomplete prefix's row what exists of it, and leaves the gaps."""
    width = 0
    if known is not None:
        width = known.shape[1]
        row[:, :width] = known
    if unfolding.basis is not None and unfolding.target is not None:
        r = unfolding.whole.shape[2]
        child = row[:, width : width + q * r]
        missing = unfolding.target - child.reshape(-1, r) @ unfolding.basis
        child += _fit(unfolding.basis, missing, cutoff).view(child.shape)


def _fit(basis: Tensor, target: Tensor, cutoff: float) -> Tensor:
    """Coefficients of least norm with which `basis` comes nearest to `target`."""
    inverse: Tensor = torch.linalg.pinv(basis, rtol=cutoff)
    return target @ inverse


def _first_core(unfolding: _Unfolding, p: int, cutoff: float) -> Tensor:
    """``[p, 1, q, r]``; slices that no row has are zero."""
    whole = unfolding.whole
    core = whole.new_zeros((p, 1, *whole.shape[1:]))
    core[: whole.shape[0], 0] = whole
    if unfolding.basis is not None and unfolding.target is not None:
        core[whole.shape[0], 0] = _fit(unfolding.basis, unfolding.target, cutoff)
    return core


def _balanced(cores: list[Tensor]) -> list[Tensor]:
    """The cores scaled to equal root mean squares, so that none trains slower than the others."""
    sizes = [core.square().mean().sqrt().item() for core in cores]
    if min(sizes) == 0.0:
        return cores
    common = math.exp(sum(math.log(size) for size in sizes) / len(sizes))
    return [core * (common / size) for core, size in zip(cores, sizes, strict=True)]


def _errors(weight: Tensor, cores: list[Tensor]) -> tuple[float, float]:
    start, difference, norm, largest = 0, 0.0, 0.0, 0.0
    for block in row_blocks(cores, weight.shape[0]):
        rows = weight[start : start + block.shape[0]].to(torch.float64)
        start += block.shape[0]
        norm += rows.square().sum().item()
        rows = rows - block
        difference += rows.square().sum().item()
        largest = max(largest, rows.abs().max().item())
    return (math.sqrt(difference / norm) if norm else math.sqrt(difference)), largest
