"""Plain-torch reconstruction, against the definition of a TT table entry by entry."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchrec_flowtt.functional import rows, to_dense


def make_cores(
    p: tuple[int, ...], q: tuple[int, ...], ranks: tuple[int, ...], dtype: torch.dtype
) -> list[Tensor]:
    """Gaussian cores of the given shape, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    bonds = (1, *ranks, 1)
    return [
        torch.randn(
            (p[k], bonds[k], q[k], bonds[k + 1]), generator=generator, dtype=torch.float64
        ).to(dtype)
        for k in range(len(p))
    ]


def table_by_definition(cores: list[Tensor]) -> Tensor:
    """Every entry as the matrix product of its slices, digits counted most significant first."""
    p = [core.shape[0] for core in cores]
    q = [core.shape[2] for core in cores]
    table = torch.empty(math.prod(p), math.prod(q), dtype=torch.float64)
    for i, row_digits in enumerate(itertools.product(*map(range, p))):
        for j, column_digits in enumerate(itertools.product(*map(range, q))):
            entry = torch.ones(1, 1, dtype=torch.float64)
            for core, a, b in zip(cores, row_digits, column_digits, strict=True):
                entry = entry @ core[a, :, b, :].double()
            table[i, j] = entry.item()
    return table


SHAPES = [
    ((4, 5), (3, 2), (7,)),
    ((3, 2, 4), (2, 3, 2), (4, 5)),
    ((2, 3, 2, 2), (2, 1, 3, 2), (3, 1, 2)),
    ((1, 6), (1, 5), (1,)),
]


@pytest.mark.parametrize(("p", "q", "ranks"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_to_dense_and_rows_match_the_definition(
    p: tuple[int, ...], q: tuple[int, ...], ranks: tuple[int, ...], dtype: torch.dtype
) -> None:
    cores = make_cores(p, q, ranks, dtype)
    expected = table_by_definition(cores)
    dense = to_dense(cores)
    assert dense.dtype == dtype
    # Relative to the table's size: half precision is rounded once, after float32 sums.
    bound = 4 * torch.finfo(dtype).eps * expected.abs().max()
    assert (dense.double() - expected).abs().max() <= bound
    indices = torch.arange(math.prod(p), dtype=torch.int32).flip(0)
    picked = rows(cores, indices)
    assert picked.dtype == dtype
    assert (picked.double() - expected.flip(0)).abs().max() <= bound


@given(num_embeddings=st.integers(0, 24))
@settings(max_examples=25)
def test_to_dense_stops_at_num_embeddings(num_embeddings: int) -> None:
    cores = make_cores(*SHAPES[1], torch.float64)
    dense = to_dense(cores, num_embeddings)
    assert dense.shape == (num_embeddings, 12)
    torch.testing.assert_close(dense, to_dense(cores)[:num_embeddings])


def test_to_dense_of_a_few_rows_of_a_huge_cover_stays_small() -> None:
    cores = [torch.ones(10**6, 1, 2, 1), torch.ones(10**6, 1, 1, 1), torch.ones(3, 1, 2, 1)]
    assert to_dense(cores, 4).tolist() == [[1.0] * 4] * 4


def test_rows_keeps_the_shape_of_indices_and_64_bits() -> None:
    p = (3, 2**20, 2**20)
    cores = [torch.randn(size, 1, 2, 1, dtype=torch.float64) for size in p]
    digits = torch.tensor([[2, 5, 2**20 - 1], [1, 2**20 - 1, 0]])
    indices = (digits[:, 0] * p[1] + digits[:, 1]) * p[2] + digits[:, 2]
    assert int(indices.max()) > 2**40
    expected = torch.stack(
        [
            torch.kron(
                torch.kron(cores[0][a].flatten(), cores[1][b].flatten()), cores[2][c].flatten()
            )
            for a, b, c in digits.tolist()
        ]
    )
    torch.testing.assert_close(rows(cores, indices), expected)
    assert rows(cores, indices.reshape(2, 1, 1)).shape == (2, 1, 1, 8)
    assert rows(cores, indices[0]).shape == (8,)
    assert rows(cores, indices[:0]).shape == (0, 8)


def test_autocast_and_meta() -> None:
    cores = make_cores(*SHAPES[1], torch.float32)
    indices = torch.tensor([3, 23])
    expected = to_dense(cores), rows(cores, indices)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(to_dense(cores), expected[0])
        assert torch.equal(rows(cores, indices), expected[1])
    meta = [core.to("meta") for core in cores]
    assert to_dense(meta, 20).shape == (20, 12)
    assert rows(meta, indices.to("meta")).shape == (2, 12)


def test_gradcheck_and_gradgradcheck() -> None:
    cores = [
        core.requires_grad_() for core in make_cores((2, 3, 2), (2, 1, 2), (2, 2), torch.float64)
    ]
    indices = torch.tensor([0, 5, 5, 11])
    assert torch.autograd.gradcheck(lambda *c: to_dense(c, 9), cores)
    assert torch.autograd.gradcheck(lambda *c: rows(c, indices), cores)
    assert torch.autograd.gradgradcheck(lambda *c: rows(c, indices[:2]), cores)


def test_errors() -> None:
    cores = make_cores(*SHAPES[0], torch.float32)
    with pytest.raises(ValueError, match=r"num_embeddings must be 0 to 20.* got 21"):
        to_dense(cores, 21)
    with pytest.raises(TypeError, match=r"indices must be int32 or int64, got torch.float32"):
        rows(cores, torch.tensor([1.0]))
    for index in (-1, 20):
        with pytest.raises(IndexError):
            rows(cores, torch.tensor([index]))
    with pytest.raises(ValueError, match="2 to 4 TT-cores, got 1"):
        to_dense(cores[:1])
    with pytest.raises(
        ValueError, match=r"cores\[1\] must have rank 7 .* got shape \(5, 6, 2, 1\)"
    ):
        to_dense([cores[0], torch.ones(5, 6, 2, 1)])
    with pytest.raises(ValueError, match=r"cores\[0\] must have rank 1 .* as first core"):
        to_dense([torch.ones(5, 6, 2, 7), cores[1]])
    with pytest.raises(ValueError, match=r"cores\[1\] must have rank 1 in dimension 3"):
        to_dense([cores[0], torch.ones(5, 7, 2, 3)])
    with pytest.raises(ValueError, match=r"cores\[1\] must have shape \[p, r_in, q, r_out\]"):
        to_dense([cores[0], torch.ones(5, 7, 2)])
    with pytest.raises(TypeError, match=r"cores\[1\].*torch.float64 beside torch.float32"):
        to_dense([cores[0], cores[1].double()])
    with pytest.raises(TypeError, match="got Tensor"):
        to_dense(cores[0])  # type: ignore[arg-type]
