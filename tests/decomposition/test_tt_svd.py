"""TT-SVD against tables with known cores, and against the textbook's algorithm."""

from __future__ import annotations

import math

import pytest
import torch

from tests.reference import dense_table
from tests.tolerances import assert_close
from torchrec_flowtt.decomposition import decompose
from torchrec_flowtt.shapes import TTSpec

SHAPES = [
    ((4, 5), (2, 3), (3,)),
    ((3, 4, 5), (2, 2, 3), (4, 3)),
    ((2, 3, 4), (2, 2, 2), (4, 8)),
    ((2, 3, 2, 3), (2, 1, 2, 2), (2, 4, 3)),
]


def spec_of(shape, num_embeddings=None) -> TTSpec:
    p, q, ranks = shape
    return TTSpec(num_embeddings or math.prod(p), math.prod(q), p, q, ranks, name="ads")


def cores_of(spec, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator, dtype=dtype) for s in spec.core_shapes]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_table_with_cores_of_these_ranks_is_reproduced(shape):
    """Also if its last prefix has rows that do not exist, at any level."""
    rows = math.prod(shape[0])
    for num_embeddings in range(rows // shape[0][0] + 1, rows + 1):
        spec = spec_of(shape, num_embeddings)
        table = dense_table(cores_of(spec))[:num_embeddings]
        for block_rows in (None, 3):
            found = decompose(table, spec, block_rows=block_rows)
            assert [tuple(core.shape) for core in found.cores] == list(spec.core_shapes)
            # Of the rows of one prefix alone the iteration leaves a little more.
            assert found.relative_error < 1e-8, num_embeddings
            difference = dense_table(found.cores)[:num_embeddings] - table
            assert abs(difference.norm() / table.norm() - found.relative_error) < 1e-12
            assert abs(difference.abs().max() - found.largest_error) < 1e-12


def textbook(table, spec):
    """Left to right, on the whole table; returns the dense table of the cores."""
    d = spec.num_cores
    rest = table.reshape(*spec.p_shapes, *spec.q_shapes)
    rest = rest.permute([axis for k in range(d) for axis in (k, d + k)])
    cores, left = [], 1
    for p, q, rank in zip(spec.p_shapes, spec.q_shapes, spec.tt_ranks, strict=False):
        u, s, vh = torch.linalg.svd(rest.reshape(left * p * q, -1), full_matrices=False)
        cores.append(u[:, :rank].reshape(left, p, q, rank).permute(1, 0, 2, 3))
        rest, left = s[:rank, None] * vh[:rank], rank
    last = rest.reshape(left, spec.p_shapes[-1], spec.q_shapes[-1], 1).permute(1, 0, 2, 3)
    return dense_table([*cores, last])


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_any_other_table_is_approximated_as_well_as_by_the_textbook(shape):
    spec = spec_of(shape)
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(spec.num_embeddings, spec.embedding_dim, generator=generator).double()
    found = decompose(table, spec, block_rows=7)
    expected = (textbook(table, spec) - table).norm() / table.norm()
    assert 0.1 < found.relative_error
    # Two cores have one best approximation; with more, the direction matters a little.
    slack = 1e-10 if spec.num_cores == 2 else 0.02
    assert abs(found.relative_error / expected - 1) < slack


def test_padding_takes_nothing_from_the_rows_that_exist():
    """Zeros in place of the missing rows would."""
    full = spec_of(SHAPES[1])
    spec = spec_of(SHAPES[1], 53)
    generator = torch.Generator().manual_seed(2)
    noise = torch.randn(60, 12, generator=generator).double()
    table = dense_table(cores_of(full)) + 0.1 * noise
    found = decompose(table[:53], spec).relative_error
    padded = torch.nn.functional.pad(table[:53], (0, 0, 0, 7))
    zeros = (textbook(padded, full)[:53] - table[:53]).norm() / table[:53].norm()
    assert found < 0.9 * zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype):
    spec = spec_of(SHAPES[1], 57)
    cores = cores_of(spec)
    table = dense_table(cores)[:57].to(dtype)
    found = decompose(table, spec)
    assert all(core.dtype == dtype for core in found.cores)
    assert_close(dense_table(found.cores)[:57].to(dtype), table.double(), "table", slack=8)
    wide = decompose(table, spec, dtype=torch.float64)
    assert wide.cores[0].dtype == torch.float64
    assert wide.relative_error <= found.relative_error
    sizes = [core.double().square().mean().sqrt().item() for core in wide.cores]
    assert max(sizes) / min(sizes) < 1 + 1e-6


def test_higher_ranks_than_useful_and_a_table_of_zeros():
    spec = TTSpec(20, 6, (4, 5), (2, 3), (40,))
    table = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    assert decompose(table, spec).relative_error < 1e-6
    found = decompose(torch.zeros(20, 6), spec)
    assert found.relative_error == found.largest_error == 0.0
    assert all(core.isfinite().all() for core in found.cores)


@pytest.mark.parametrize("row", [0, 56])
def test_wrong_tables_are_refused(row):
    spec = spec_of(SHAPES[1], 57)
    table = torch.zeros(57, 12)
    with pytest.raises(ValueError, match=r"'ads': weight must have shape \[57, 12\].*\[56, 12\]"):
        decompose(table[:56], spec)
    with pytest.raises(TypeError, match="'ads': dtype of the weight must be one of .*int64"):
        decompose(table.long(), spec)
    table[row, 3] = math.nan
    with pytest.raises(ValueError, match="'ads': weight must be finite"):
        decompose(table, spec)
