"""tt_embedding_bag on CUDA against float64 reconstruction."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.calls import MEAN, SUM, Table, make_call
from tests.gpu.expected import assert_matches, expect
from tests.gpu.shapes import SMALL, TABLES

CORE_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
INDEX_DTYPES = [torch.int32, torch.int64]


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", CORE_DTYPES, ids=str)
def test_tables(name: str, dtype: torch.dtype) -> None:
    group = TABLES[name]
    call = group.call(dtype=dtype, weighted=True, device="cuda")
    assert_matches(call.forward(), expect(call).output)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling_mode", [SUM, MEAN])
def test_pooling(name: str, weighted: bool, pooling_mode: int) -> None:
    group = TABLES[name]
    call = group.call(
        batch_size=9, max_length=7, weighted=weighted, pooling_mode=pooling_mode, device="cuda"
    )
    assert_matches(call.forward(), expect(call).output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_output_dtypes(dtype: torch.dtype, output_dtype: torch.dtype) -> None:
    call = make_call(TABLES["three cores"].tables, dtype=dtype, device="cuda")
    output = call.forward(output_dtype)
    assert output.dtype == output_dtype
    assert_matches(output, expect(call).output)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
@pytest.mark.parametrize("offset_dtype", INDEX_DTYPES, ids=str)
def test_index_dtypes(index_dtype: torch.dtype, offset_dtype: torch.dtype) -> None:
    group = TABLES["features share tables"]
    call = group.call(
        index_dtype=index_dtype, offset_dtype=offset_dtype, weighted=True, device="cuda"
    )
    assert_matches(call.forward(), expect(call).output)


def test_empty_bags_are_zero() -> None:
    lengths = [0, 3, 0, 0, 2, 0]
    for pooling_mode in (SUM, MEAN):
        call = make_call(
            TABLES["three cores"].tables,
            batch_size=6,
            lengths=lengths,
            pooling_mode=pooling_mode,
            device="cuda",
        )
        output = call.forward()
        assert_matches(output, expect(call).output)
        assert torch.equal(output[[0, 2, 3, 5]], torch.zeros_like(output[[0, 2, 3, 5]]))


def test_no_lookups() -> None:
    call = make_call(TABLES["two cores"].tables, batch_size=4, lengths=[0] * 4, device="cuda")
    assert torch.equal(call.forward(), torch.zeros(4, 12, device="cuda"))


def test_batch_of_zero() -> None:
    group = TABLES["different tables"]
    call = make_call(group.tables, batch_size=0, device="cuda")
    assert call.forward().shape == (0, 12 + 32 + 12)


def test_more_bags_than_blocks() -> None:
    call = make_call(TABLES["rank 1"].tables, batch_size=20_000, max_length=3, device="cuda")
    assert_matches(call.forward(), expect(call).output)


def test_long_bag() -> None:
    call = make_call(TABLES["two cores"].tables, batch_size=1, lengths=[3000], device="cuda")
    assert_matches(call.forward(), expect(call).output)


@pytest.mark.parametrize(
    "table",
    [
        Table((2000, 2000, 2000), (2, 2, 2), (4, 4)),
        Table((70_000, 70_001), (4, 2), (3,)),
        Table((60_000, 5, 7, 60_000), (1, 2, 2, 2), (2, 2, 2)),
    ],
)
def test_ids_above_2_31(table: Table) -> None:
    last = table.rows - 1
    ids = [last, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 12_345, 0]
    call = make_call([table], batch_size=4, lengths=[3, 0, 4, 1], ids=ids, device="cuda")
    assert_matches(call.forward(), expect(call).output)


def test_output_above_2_31_elements() -> None:
    """Row offsets in the output need 64 bits."""
    table = Table((4, 4), (32, 32), (2,))
    batch_size = 2**21 + 3
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of free GPU memory")
    small = make_call([table], batch_size=3, lengths=[1, 0, 2], device="cuda")
    large = make_call(
        [table],
        batch_size=batch_size,
        lengths=[0] * (batch_size - 3) + [1, 0, 2],
        ids=small.indices.tolist(),
        device="cuda",
    )
    output = large.forward(torch.bfloat16)
    assert output.numel() > 2**31
    assert_matches(output[-3:], expect(small).output)
    assert output[:-3].count_nonzero() == 0


def test_cores_may_be_strided_views() -> None:
    call = make_call(TABLES["three cores"].tables, device="cuda")
    expected = expect(call).output
    call.cores = [core.transpose(0, 3).contiguous().transpose(0, 3) for core in call.cores]
    assert not call.cores[1].is_contiguous()
    assert_matches(call.forward(), expected)
