"""Batches in which every feature has a batch size of its own.

TorchRec deduplicates the bags of a feature, after which features differ in their number of bags
("variable batch per feature"). The TT operators look up the same number of bags for every
feature, so shorter features are padded with empty bags, which cost nothing but their offsets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def equal_batch_offsets(offsets: torch.Tensor, batch_sizes: Sequence[int]) -> torch.Tensor:
    """Offsets of the bags when every feature is padded with empty bags to the largest batch.

    Args:
        offsets: offsets of all bags, feature after feature, ``[sum of batch_sizes + 1]``.
        batch_sizes: number of bags of each of the F features.

    Returns:
        ``[F * max(batch_sizes) + 1]``, the dtype of `offsets`.

    Example:
        >>> equal_batch_offsets(torch.tensor([0, 2, 3, 5, 9]), [3, 1])
        tensor([0, 2, 3, 5, 9, 9, 9])
    """
    largest = max(batch_sizes)
    sizes = torch.tensor(batch_sizes, device=offsets.device)
    starts = sizes.cumsum(0) - sizes
    bags = torch.arange(largest, device=offsets.device)
    positions = torch.minimum(bags.unsqueeze(0), sizes.unsqueeze(1)) + starts.unsqueeze(1)
    return torch.cat([offsets[positions.reshape(-1)], offsets[-1:]])


def rank_major(
    pooled: torch.Tensor, strides: Sequence[Sequence[int]], dims: Sequence[int]
) -> torch.Tensor:
    """The embeddings of all bags that were asked for, rank after rank, feature after feature.

    Args:
        pooled: ``[B, sum of dims]``; of feature f the first ``sum(strides[f])`` rows count.
        strides: for each feature the number of bags that each rank asked for.
        dims: embedding dimension of each feature.

    Returns:
        A flat tensor.
    """
    columns = pooled.split(list(dims), dim=1)
    starts = [0] * len(dims)
    pieces = []
    for rank in range(len(strides[0])):
        for f, (column, stride) in enumerate(zip(columns, strides, strict=True)):
            pieces.append(column[starts[f] : starts[f] + stride[rank]].reshape(-1))
            starts[f] += stride[rank]
    return torch.cat(pieces)


def merge_groups(
    embeddings: Sequence[torch.Tensor],
    strides: Sequence[Sequence[Sequence[int]]],
    dims: Sequence[Sequence[int]],
) -> torch.Tensor:
    """The flat embeddings of several groups of tables as if they were one group.

    Args:
        embeddings: for each group a flat tensor as :func:`rank_major` makes it.
        strides: for each group the bags by feature and rank.
        dims: for each group the embedding dimension of each feature.

    Returns:
        A flat tensor: rank after rank, group after group, feature after feature.
    """
    ranks = len(strides[0][0])
    parts = []
    for embedding, group_strides, group_dims in zip(embeddings, strides, dims, strict=True):
        sizes = [
            sum(stride[rank] * dim for stride, dim in zip(group_strides, group_dims, strict=True))
            for rank in range(ranks)
        ]
        parts.append(embedding.split(sizes))
    return torch.cat([part[rank] for rank in range(ranks) for part in parts])
