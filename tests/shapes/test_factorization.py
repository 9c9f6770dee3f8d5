"""Rules that choose row and column factors."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_flowtt.shapes import cover, factorize

NUM_FACTORS = st.integers(2, 4)


def smallest_covering_sum(size: int, num_factors: int) -> int:
    """Least sum of factors whose product covers `size`, by trying every combination."""
    return min(
        sum(factors)
        for factors in itertools.combinations_with_replacement(range(1, size + 1), num_factors)
        if math.prod(factors) >= size
    )


@given(st.integers(1, 2**62), NUM_FACTORS)
def test_cover_covers_with_little_waste(size: int, num_factors: int) -> None:
    factors = cover(size, num_factors)
    assert len(factors) == num_factors
    assert max(factors) - min(factors) <= 1
    largest = max(factors)
    assert math.prod(factors) >= size
    # One step down in any largest factor would leave rows uncovered.
    assert largest == 1 or math.prod(factors) * (largest - 1) < size * largest


@pytest.mark.parametrize("num_factors", [2, 3, 4])
def test_cover_has_the_least_sum(num_factors: int) -> None:
    for size in range(1, 41 if num_factors < 4 else 21):
        assert sum(cover(size, num_factors)) == smallest_covering_sum(size, num_factors)


@pytest.mark.parametrize(
    ("size", "num_factors", "expected"),
    [
        (1, 3, (1, 1, 1)),
        (10_000_000, 3, (216, 215, 216)),
        (10_000_000, 2, (3162, 3163)),
        (1_000_003, 3, (100, 100, 101)),
        (10**9, 3, (1000, 1000, 1000)),
        (2**40, 2, (2**20, 2**20)),
        (2**40, 4, (1024, 1024, 1024, 1024)),
        (10**18 + 1, 3, (10**6, 10**6, 10**6 + 1)),
    ],
)
def test_cover_values(size: int, num_factors: int, expected: tuple[int, ...]) -> None:
    assert cover(size, num_factors) == expected


@given(st.integers(1, 3000), NUM_FACTORS)
def test_factorize_is_exact_and_has_the_least_sum(size: int, num_factors: int) -> None:
    factors = factorize(size, num_factors)
    assert len(factors) == num_factors
    assert math.prod(factors) == size
    divisors = [divisor for divisor in range(1, size + 1) if size % divisor == 0]
    heads = itertools.combinations_with_replacement(divisors, num_factors - 1)
    assert sum(factors) == min(
        sum(head) + size // math.prod(head) for head in heads if size % math.prod(head) == 0
    )


@given(st.integers(1, 100_000), st.integers(3, 4))
def test_smallest_factors_are_inside_and_the_largest_is_last(size: int, num_factors: int) -> None:
    for factors in (factorize(size, num_factors), cover(size, num_factors)):
        first, *inner, last = factors
        assert inner == sorted(inner)
        assert max(inner) <= first <= last


@pytest.mark.parametrize(
    ("size", "num_factors", "expected"),
    [
        (128, 3, (4, 4, 8)),
        (128, 2, (8, 16)),
        (128, 4, (4, 2, 4, 4)),
        (64, 3, (4, 4, 4)),
        (32, 3, (4, 2, 4)),
        (16, 3, (2, 2, 4)),
        (127, 3, (1, 1, 127)),
        (127, 2, (1, 127)),
        (1, 4, (1, 1, 1, 1)),
        (100, 3, (5, 4, 5)),
        (2 * 127, 3, (2, 1, 127)),
    ],
)
def test_factorize_values(size: int, num_factors: int, expected: tuple[int, ...]) -> None:
    assert factorize(size, num_factors) == expected
