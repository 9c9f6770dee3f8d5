"""Blocks of rows against the dense reconstruction in float64."""

from __future__ import annotations

import pytest
import torch

from tests.reference import dense_table
from tests.tolerances import assert_close
from torchrec_flowtt.decomposition import reconstruct, row_blocks
from torchrec_flowtt.shapes import TTSpec


@pytest.mark.parametrize("num_cores", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("block_rows", [1, 25, 1000])
def test_blocks_are_the_table(num_cores, dtype, block_rows):
    spec = TTSpec.suggest(101, 12, tt_ranks=3, num_cores=num_cores)
    generator = torch.Generator().manual_seed(0)
    cores = [torch.randn(s, generator=generator).to(dtype) for s in spec.core_shapes]
    expected = dense_table(cores)
    blocks = list(row_blocks(cores, 101, block_rows))
    assert len(blocks) == (1 if block_rows == 1000 else len(blocks)) and blocks[0].shape[0] > 0
    assert all(block.shape[0] <= max(block_rows, spec.p_shapes[-1]) for block in blocks)
    assert_close(torch.cat(blocks), expected[:101], "blocks", slack=2)
    whole = reconstruct(cores, dtype=torch.float16, block_rows=block_rows)
    assert whole.dtype == torch.float16
    assert_close(whole, expected, "table")


def test_wrong_arguments():
    cores = [torch.ones(2, 1, 3, 2), torch.ones(4, 2, 2, 1)]
    with pytest.raises(ValueError, match="num_embeddings must be 1 to 8"):
        reconstruct(cores, 9)
    with pytest.raises(TypeError, match="dtype must be one of .* got torch.int8"):
        reconstruct(cores, dtype=torch.int8)
