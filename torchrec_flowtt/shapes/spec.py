"""The shape of one Tensor-Train compressed embedding table."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import torch

from torchrec_flowtt.shapes.arguments import positive_integer, positive_integers, table_label
from torchrec_flowtt.shapes.factorization import cover, factorize

__all__ = ["TTSpec"]

_MIN_CORES = 2
_MAX_CORES = 4
_INT64_MAX = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class TTSpec:
    r"""Shape of a table of N rows and D columns that is stored as d TT-cores.

    Core k (k = 1..d) is a tensor of shape ``[p_k, r_(k-1), q_k, r_k]`` with ``r_0 = r_d = 1``. A
    row index i and a column index j are mixed-radix numbers whose first digit is the most
    significant, in row-major order:

    ``i = (i_1 * p_2 + i_2) * p_3 + i_3``, ``j = (j_1 * q_2 + j_2) * q_3 + j_3`` (three cores), and

    ``table[i, j] = G_1[i_1, :, j_1, :] @ G_2[i_2, :, j_2, :] @ G_3[i_3, :, j_3, :]``.

    This is the tensor-train matrix of Oseledets, "Tensor-Train Decomposition", SIAM J. Sci. Comput.
    33 (2011), applied to embedding tables as in TT-Rec (Yin et al., MLSys 2021).

    Args:
        num_embeddings: N, rows of the table.
        embedding_dim: D, columns of the table.
        p_shapes: row factors, one a core; their product is at least N (rows N and above are
            padding).
        q_shapes: column factors, one a core; their product is D.
        tt_ranks: inner ranks ``r_1 .. r_(d-1)``, any positive integers.
        name: name of the table, for error messages only; specs that differ in it alone are equal.

    Sequences are stored as tuples. d is 2 to 4.

    Raises:
        TypeError: an argument is not an integer or not a sequence of integers (bool and float are
            refused).
        ValueError: an argument is not positive, the lengths disagree, or the factors do not fit N
            and D.

    Example: 24 rows as 2 x 3 x 4 and 8 columns as 2 x 2 x 2. Row 17 is the digits (1, 1, 1), as
    ``(1 * 3 + 1) * 4 + 1 = 17``; column 5 is the digits (1, 0, 1), as ``(1 * 2 + 0) * 2 + 1 = 5``.
    So ``table[17, 5]`` is slice 1 of every core, at columns 1, 0 and 1:

    >>> spec = TTSpec(24, 8, p_shapes=(2, 3, 4), q_shapes=(2, 2, 2), tt_ranks=(5, 6))
    >>> spec.core_shapes
    ((2, 1, 2, 5), (3, 5, 2, 6), (4, 6, 2, 1))
    >>> g1, g2, g3 = (torch.rand(shape, dtype=torch.float64) for shape in spec.core_shapes)
    >>> entry = g1[1, :, 1, :] @ g2[1, :, 0, :] @ g3[1, :, 1, :]
    >>> table = torch.einsum("iajb,kblc,mcnd->ikmjln", g1, g2, g3).reshape(24, 8)
    >>> bool(torch.isclose(table[17, 5], entry[0, 0]))
    True
    """

    num_embeddings: int
    embedding_dim: int
    p_shapes: tuple[int, ...]
    q_shapes: tuple[int, ...]
    tt_ranks: tuple[int, ...]
    name: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        """Normalises and validates the arguments."""
        if not isinstance(self.name, str):
            raise TypeError(f"TT table: name must be a str, got {self.name!r}")
        for argument in ("num_embeddings", "embedding_dim"):
            value = positive_integer(getattr(self, argument), argument, self._where)
            object.__setattr__(self, argument, value)
        for argument in ("p_shapes", "q_shapes", "tt_ranks"):
            values = positive_integers(getattr(self, argument), argument, self._where)
            object.__setattr__(self, argument, values)
        self._validate_lengths()
        self._validate_products()

    @property
    def _where(self) -> str:
        return table_label(self.name)

    def _validate_lengths(self) -> None:
        cores = len(self.p_shapes)
        if not _MIN_CORES <= cores <= _MAX_CORES:
            raise ValueError(
                f"{self._where}: p_shapes must have {_MIN_CORES} to {_MAX_CORES} factors, one a "
                f"core, got {cores}: {self.p_shapes}"
            )
        if len(self.q_shapes) != cores:
            raise ValueError(
                f"{self._where}: q_shapes must have {cores} factors, as p_shapes {self.p_shapes}, "
                f"got {len(self.q_shapes)}: {self.q_shapes}"
            )
        if len(self.tt_ranks) != cores - 1:
            raise ValueError(
                f"{self._where}: tt_ranks must have {cores - 1} inner ranks for {cores} cores, "
                f"got {len(self.tt_ranks)}: {self.tt_ranks}"
            )

    def _validate_products(self) -> None:
        rows = math.prod(self.p_shapes)
        if rows < self.num_embeddings:
            raise ValueError(
                f"{self._where}: the product of p_shapes must be at least num_embeddings "
                f"{self.num_embeddings}, got {rows} from {self.p_shapes}"
            )
        if rows > _INT64_MAX:
            raise ValueError(
                f"{self._where}: the product of p_shapes must fit a 64-bit index (at most "
                f"{_INT64_MAX}), got {rows} from {self.p_shapes}"
            )
        columns = math.prod(self.q_shapes)
        if columns != self.embedding_dim:
            raise ValueError(
                f"{self._where}: the product of q_shapes must be embedding_dim "
                f"{self.embedding_dim}, got {columns} from {self.q_shapes}"
            )

    @classmethod
    def suggest(
        cls,
        num_embeddings: int,
        embedding_dim: int,
        *,
        tt_ranks: int | Sequence[int] | None = None,
        num_cores: int | None = None,
        p_shapes: Sequence[int] | None = None,
        q_shapes: Sequence[int] | None = None,
        max_bytes: int | None = None,
        dtype: torch.dtype = torch.float32,
        name: str = "",
    ) -> TTSpec:
        """Chooses balanced factors for a table, and the rank when given a byte budget.

        Row factors differ by at most one and have the least sum whose product covers N
        (:func:`~torchrec_flowtt.shapes.cover`); column factors have the least sum whose product is
        exactly D (:func:`~torchrec_flowtt.shapes.factorize`). The smallest of each go to the inner
        cores, the largest to the last. The choice is deterministic and depends on N, D and the
        number of cores alone.

        Args:
            num_embeddings: N, rows of the table.
            embedding_dim: D, columns of the table.
            tt_ranks: one rank for all inner bonds, or one for each. Kept as given, even if larger
                than useful.
            num_cores: d, 2 to 4. Default: as many as `p_shapes`, `q_shapes` or a sequence of ranks
                implies, else 3.
            p_shapes: row factors to use in place of the chosen ones.
            q_shapes: column factors to use in place of the chosen ones.
            max_bytes: upper limit of the cores' bytes. Without `tt_ranks`, the largest uniform rank
                that fits is taken; no bond gets more than its maximal useful rank,
                ``min(prod_(k<=b) p_k q_k, prod_(k>b) p_k q_k)``, with which any table can be
                represented. With `tt_ranks`, the limit is only checked.
            dtype: dtype of the cores, for `max_bytes`.
            name: name of the table.

        Returns:
            The spec.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument is out of range, neither `tt_ranks` nor `max_bytes` was given,
                or no rank fits the budget.

        >>> spec = TTSpec.suggest(10_000_000, 128, tt_ranks=32)
        >>> spec.p_shapes, spec.q_shapes, spec.tt_ranks
        ((216, 215, 216), (4, 4, 8), (32, 32))
        >>> round(spec.compression_ratio)
        1328
        >>> TTSpec.suggest(10_000_000, 128, max_bytes=4_000_000).tt_ranks
        (32, 32)
        """
        where = table_label(name)
        num_embeddings = positive_integer(num_embeddings, "num_embeddings", where)
        embedding_dim = positive_integer(embedding_dim, "embedding_dim", where)
        if p_shapes is not None:
            p_shapes = positive_integers(p_shapes, "p_shapes", where)
        if q_shapes is not None:
            q_shapes = positive_integers(q_shapes, "q_shapes", where)
        ranks: int | tuple[int, ...] | None = None
        if isinstance(tt_ranks, Sequence):
            ranks = positive_integers(tt_ranks, "tt_ranks", where)
        elif tt_ranks is not None:
            ranks = positive_integer(tt_ranks, "tt_ranks", where)
        if max_bytes is not None:
            max_bytes = positive_integer(max_bytes, "max_bytes", where)

        cores = _num_cores(num_cores, p_shapes, q_shapes, ranks, where)
        build = functools.partial(
            cls,
            num_embeddings,
            embedding_dim,
            p_shapes if p_shapes is not None else cover(num_embeddings, cores),
            q_shapes if q_shapes is not None else factorize(embedding_dim, cores),
            name=name,
        )
        if ranks is None:
            if max_bytes is None:
                raise ValueError(f"{where}: give tt_ranks or max_bytes, got neither")
            return _largest_fitting(build, cores, max_bytes, dtype, where)
        spec = build((ranks,) * (cores - 1) if isinstance(ranks, int) else ranks)
        if max_bytes is not None and spec.num_bytes(dtype) > max_bytes:
            raise ValueError(
                f"{where}: max_bytes is {max_bytes}, but ranks {spec.tt_ranks} need "
                f"{spec.num_bytes(dtype)} bytes of {dtype}"
            )
        return spec

    @property
    def num_cores(self) -> int:
        """d, the number of TT-cores."""
        return len(self.p_shapes)

    @property
    def core_shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Shapes ``(p_k, r_(k-1), q_k, r_k)`` of the cores, with ``r_0 = r_d = 1``."""
        ranks = (1, *self.tt_ranks, 1)
        return tuple(zip(self.p_shapes, ranks[:-1], self.q_shapes, ranks[1:], strict=True))

    @property
    def num_parameters(self) -> int:
        """Elements of all cores together."""
        return sum(math.prod(shape) for shape in self.core_shapes)

    def num_bytes(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of all cores together when stored as `dtype`."""
        return self.num_parameters * dtype.itemsize

    @property
    def compression_ratio(self) -> float:
        """Elements of the uncompressed table, N x D, over those of the cores."""
        return self.num_embeddings * self.embedding_dim / self.num_parameters

    @property
    def flops_per_lookup(self) -> int:
        """Floating-point operations of one row, sharing nothing with other rows.

        A multiply-add counts as two. The chain is evaluated from the left: the product of the first
        k - 1 slices, a matrix of ``q_1 .. q_(k-1)`` rows and ``r_(k-1)`` columns, times slice k,
        one of ``r_(k-1)`` rows and ``q_k * r_k`` columns. Hence the sum over k = 2..d of ``2 * (q_1
        .. q_(k-1)) * r_(k-1) * q_k * r_k``.
        """
        flops = 0
        columns = self.q_shapes[0]
        for _, rank_in, factor, rank_out in self.core_shapes[1:]:
            flops += 2 * columns * rank_in * factor * rank_out
            columns *= factor
        return flops

    @property
    def max_useful_ranks(self) -> tuple[int, ...]:
        """Ranks with which any table of this shape can be represented exactly.

        Each is the smaller dimension of the unfolding at its bond (Oseledets 2011, theorem 2.1); a
        larger rank is allowed and only wastes parameters.
        """
        sizes = [p * q for p, q in zip(self.p_shapes, self.q_shapes, strict=True)]
        return tuple(
            min(math.prod(sizes[:bond]), math.prod(sizes[bond:])) for bond in range(1, len(sizes))
        )


def _num_cores(
    num_cores: int | None,
    p_shapes: tuple[int, ...] | None,
    q_shapes: tuple[int, ...] | None,
    ranks: int | tuple[int, ...] | None,
    where: str,
) -> int:
    """The number of cores asked for, or the one that the other arguments imply."""
    if num_cores is None:
        if p_shapes is not None:
            num_cores = len(p_shapes)
        elif q_shapes is not None:
            num_cores = len(q_shapes)
        elif isinstance(ranks, tuple):
            num_cores = len(ranks) + 1
        else:
            num_cores = 3
    num_cores = positive_integer(num_cores, "num_cores", where)
    if not _MIN_CORES <= num_cores <= _MAX_CORES:
        raise ValueError(
            f"{where}: num_cores must be {_MIN_CORES} to {_MAX_CORES}, got {num_cores}"
        )
    for argument, factors in (("p_shapes", p_shapes), ("q_shapes", q_shapes)):
        if factors is not None and len(factors) != num_cores:
            raise ValueError(
                f"{where}: {argument} must have {num_cores} factors, one a core, "
                f"got {len(factors)}: {factors}"
            )
    if isinstance(ranks, tuple) and len(ranks) != num_cores - 1:
        raise ValueError(
            f"{where}: tt_ranks must have {num_cores - 1} inner ranks for {num_cores} cores, "
            f"got {len(ranks)}: {ranks}"
        )
    return num_cores


def _largest_fitting(
    build: Callable[[tuple[int, ...]], TTSpec],
    cores: int,
    max_bytes: int,
    dtype: torch.dtype,
    where: str,
) -> TTSpec:
    """The spec of the largest uniform rank within `max_bytes`, clipped to the useful ranks."""
    smallest = build((1,) * (cores - 1))
    if smallest.num_bytes(dtype) > max_bytes:
        raise ValueError(
            f"{where}: max_bytes {max_bytes} is too small: even rank 1 needs "
            f"{smallest.num_bytes(dtype)} bytes of {dtype} for p_shapes {smallest.p_shapes} and "
            f"q_shapes {smallest.q_shapes}"
        )
    useful = smallest.max_useful_ranks

    def clipped(rank: int) -> TTSpec:
        return build(tuple(min(rank, limit) for limit in useful))

    low, high = 1, max(useful)
    while low < high:
        middle = (low + high + 1) // 2
        if clipped(middle).num_bytes(dtype) <= max_bytes:
            low = middle
        else:
            high = middle - 1
    return clipped(low)
