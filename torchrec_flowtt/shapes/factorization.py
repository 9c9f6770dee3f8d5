"""Balanced factors for the rows and columns of a table.

Both rules depend on the table's size and the number of cores alone, so a table keeps its factors
when its rank changes.
"""

from __future__ import annotations

import functools
import math

__all__ = ["cover", "factorize"]


def cover(size: int, num_factors: int) -> tuple[int, ...]:
    """Row factors: the smallest balanced ones whose product is at least ``size``.

    The factors differ by at most one. Among all ``num_factors`` positive integers whose product
    covers ``size`` they have the least sum (the product of integers with a given sum is largest
    when they are balanced), which for equally large slices means the fewest parameters. With ``a =
    max(cover(...)) > 1`` the product is less than ``size * a / (a - 1)``, so padding is below 0.5%
    for ten million rows in three factors. See :func:`_arrange` for their order.

    Args:
        size: number of rows to cover, positive; up to 2^62 or more, the cost does not depend on it.
        num_factors: number of factors, positive.

    Returns:
        ``num_factors`` positive integers.

    >>> cover(10_000_000, 3)
    (216, 215, 216)
    >>> cover(7, 2)
    (3, 3)
    """
    largest = _ceil_root(size, num_factors)
    for num_largest in range(1, num_factors + 1):
        factors = [largest - 1] * (num_factors - num_largest) + [largest] * num_largest
        if math.prod(factors) >= size:
            break
    return _arrange(factors)


@functools.lru_cache(maxsize=1024)
def factorize(size: int, num_factors: int) -> tuple[int, ...]:
    """Column factors: those whose product is exactly ``size`` and whose sum is least.

    Equal sums are decided by the smaller largest factor. A prime therefore gives ones and itself.
    See :func:`_arrange` for their order.

    Args:
        size: embedding dimension, positive.
        num_factors: number of factors, positive.

    Returns:
        ``num_factors`` positive integers.

    >>> factorize(128, 3), factorize(64, 3), factorize(32, 3), factorize(13, 3)
    ((4, 4, 8), (4, 4, 4), (4, 2, 4), (1, 1, 13))
    """
    divisors = _divisors(size)
    best: tuple[int, int, list[int]] | None = None

    def extend(prefix: list[int], rest: int) -> None:
        """Appends factors in ascending order to ``prefix`` until their product is ``size``."""
        nonlocal best
        remaining = num_factors - len(prefix)
        if remaining == 1:
            found = (sum(prefix) + rest, rest, [*prefix, rest])
            if best is None or found < best:
                best = found
            return
        smallest = prefix[-1] if prefix else 1
        for divisor in divisors:
            if divisor**remaining > rest:
                break
            if divisor >= smallest and rest % divisor == 0:
                extend([*prefix, divisor], rest // divisor)

    extend([], size)
    assert best is not None  # (1, ..., 1, size) always qualifies
    return _arrange(best[2])


def _arrange(factors: list[int]) -> tuple[int, ...]:
    """Puts ascending ``factors`` into the order of the cores.

    The smallest go to the inner cores, whose slices hold a rank times more parameters than the
    outer ones; the largest goes to the last core, because every earlier one is part of the prefix
    products that the chain computes.
    """
    if len(factors) < 3:
        return tuple(factors)
    *inner, first, last = factors
    return (first, *inner, last)


def _ceil_root(size: int, degree: int) -> int:
    """Smallest integer whose power ``degree`` is at least ``size``; no floating point."""
    low, high = 1, 1 << (size.bit_length() // degree + 1)
    while low < high:
        middle = (low + high) // 2
        if middle**degree >= size:
            high = middle
        else:
            low = middle + 1
    return low


def _divisors(size: int) -> list[int]:
    """All divisors of ``size``, ascending."""
    small = [divisor for divisor in range(1, math.isqrt(size) + 1) if size % divisor == 0]
    return sorted({*small, *(size // divisor for divisor in small)})
