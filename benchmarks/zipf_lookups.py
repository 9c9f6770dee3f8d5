"""Synthetic lookups: bags of Zipf-distributed row indices, as recommendation traffic looks.

Row popularity follows a Zipf law with a given exponent over all rows of a table; the popular rows
are spread over the whole index range by a permutation (real ids are hashes or arrival numbers,
not ranks), or kept in order of popularity.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

_MULTIPLIER = 0x9E3779B1  # odd and prime: coprime to every table size below it


@dataclasses.dataclass(frozen=True)
class ZipfLookups:
    """What to draw.

    Attributes:
        num_embeddings: rows N of the table.
        batch_size: bags B.
        pooling_factor: lookups L of every bag.
        exponent: of the Zipf law; 0 draws uniformly.
        permuted: spread popular rows over the index range.
    """

    num_embeddings: int
    batch_size: int
    pooling_factor: int
    exponent: float = 1.05
    permuted: bool = True


@functools.lru_cache(maxsize=2)
def _cumulative_weights(population: int, exponent: float) -> Tensor:
    """Kept, as 10 million powers take longer than drawing a batch from them."""
    weights = torch.arange(1, population + 1, dtype=torch.float64).pow_(-exponent)
    return weights.cumsum_(0)


def draw_zipf_ranks(count: int, population: int, exponent: float, seed: int) -> Tensor:
    """Popularity ranks in ``[0, population)``, rank k with probability ~ ``(k + 1) ** -exponent``.

    Inverts the exact cumulative distribution, so the tail is not cut (as sampling by rejection from
    an unbounded Zipf law and folding it back would do).

    Returns:
        ``[count]`` int64.
    """
    generator = torch.Generator().manual_seed(seed)
    if exponent == 0:
        return torch.randint(population, (count,), generator=generator)
    cumulative = _cumulative_weights(population, exponent)
    draws = torch.rand(count, generator=generator, dtype=torch.float64) * cumulative[-1]
    return torch.searchsorted(cumulative, draws).clamp_(max=population - 1)


def permute_rows(ranks: Tensor, population: int) -> Tensor:
    """Maps ranks to rows by a fixed permutation, ``rank * odd prime mod population``."""
    if population > 2**31:
        raise ValueError(f"population: at most 2**31 rows can be permuted, got {population}")
    return (ranks * _MULTIPLIER) % population


def draw_zipf_lookups(spec: ZipfLookups, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Indices ``[B * L]`` and offsets ``[B + 1]``, int64."""
    count = spec.batch_size * spec.pooling_factor
    rows = draw_zipf_ranks(count, spec.num_embeddings, spec.exponent, seed)
    if spec.permuted:
        rows = permute_rows(rows, spec.num_embeddings)
    offsets = torch.arange(0, count + 1, spec.pooling_factor)
    return rows, offsets
