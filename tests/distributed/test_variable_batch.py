from __future__ import annotations

import torch

from torchrec_flowtt.distributed.variable_batch import (
    equal_batch_offsets,
    merge_groups,
    rank_major,
)


def test_shorter_features_get_empty_bags() -> None:
    offsets = torch.tensor([0, 1, 4, 4, 7, 8, 9])
    padded = equal_batch_offsets(offsets, [1, 3, 2])
    assert padded.tolist() == [0, 1, 1, 1, 4, 4, 7, 8, 9, 9]
    assert padded.dtype == offsets.dtype


def test_equal_batches_are_unchanged() -> None:
    offsets = torch.tensor([0, 1, 4, 4, 7], dtype=torch.int32)
    assert torch.equal(equal_batch_offsets(offsets, [2, 2]), offsets)


def test_features_without_bags() -> None:
    assert equal_batch_offsets(torch.tensor([0]), [0, 0]).tolist() == [0]
    assert equal_batch_offsets(torch.tensor([0, 2]), [0, 1]).tolist() == [0, 0, 2]


def test_rank_major_order() -> None:
    # Two features of dimensions 2 and 1; ranks asked for (1, 2) and (2, 0) bags of them.
    pooled = torch.tensor([[1.0, 2.0, 10.0], [3.0, 4.0, 20.0], [5.0, 6.0, 0.0]])
    flat = rank_major(pooled, [[1, 2], [2, 0]], [2, 1])
    assert flat.tolist() == [1, 2, 10, 20, 3, 4, 5, 6]


def test_merged_groups_are_one_group() -> None:
    strides, dims = [[1, 2], [2, 0], [1, 1]], [2, 1, 3]
    pooled = torch.arange(3 * 6, dtype=torch.float32).reshape(3, 6)
    first = rank_major(pooled[:, :2], strides[:1], dims[:1])
    second = rank_major(pooled[:, 2:], strides[1:], dims[1:])
    merged = merge_groups([first, second], [strides[:1], strides[1:]], [dims[:1], dims[1:]])
    assert torch.equal(merged, rank_major(pooled, strides, dims))
