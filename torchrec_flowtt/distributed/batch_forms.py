"""A batch in another form with the same meaning, where TorchRec's code needs that form."""

from __future__ import annotations

from typing import Any, cast

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def for_lookup(features: KeyedJaggedTensor, is_weighted: bool) -> KeyedJaggedTensor:
    """A batch as TorchRec's unsharded collection takes it.

    Args:
        features: the batch; it is not changed.
        is_weighted: whether the collection uses weights.

    Returns:
        The batch, without weights that are not used. One of 0 samples has features with batch
        sizes of their own, which happen to be 0: ``to_dict()`` fails on 0 samples for every
        feature alike.
    """
    if not is_weighted and features.weights_or_none() is not None:
        features = _replaced(features, weights=None)
    if _has_no_bags(features):
        features = _replaced(
            features,
            lengths=_no_lengths(features),
            offsets=None,
            stride_per_key_per_rank=torch.zeros(len(features.keys()), 1, dtype=torch.int32),
        )
    return features


def for_exchange(features: KeyedJaggedTensor, is_weighted: bool) -> KeyedJaggedTensor:
    """A batch as TorchRec's sharded collection takes it.

    Args:
        features: the batch; it is not changed.
        is_weighted: whether the collection uses weights.

    Returns:
        The batch, with weights in float32, since another dtype than other ranks have would be
        read as theirs; without weights that are not used, since TorchRec's kernels use what they
        find. One of 0 samples has lengths, as TorchRec fails on one that has offsets only.
    """
    weights = features.weights_or_none()
    if weights is not None and not is_weighted:
        features = _replaced(features, weights=None)
    elif weights is not None and weights.dtype != torch.float32:
        features = _replaced(features, weights=weights.float())
    if _has_no_bags(features) and features.lengths_or_none() is None:
        features = _replaced(features, lengths=_no_lengths(features), offsets=None, stride=0)
    return features


def with_one_empty_sample(features: KeyedJaggedTensor) -> KeyedJaggedTensor | None:
    """A batch of 0 samples with a sample that has no values; ``None`` for any other batch."""
    if not _has_no_bags(features) or not features.keys():
        return None
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=features.weights_or_none(),
        lengths=_no_lengths(features).new_zeros(len(features.keys())),
        stride=1,
    )


def _has_no_bags(features: KeyedJaggedTensor) -> bool:
    lengths = features.lengths_or_none()
    bags = features.offsets().numel() - 1 if lengths is None else lengths.numel()
    return cast(int, bags) <= 0


def _no_lengths(features: KeyedJaggedTensor) -> torch.Tensor:
    lengths = features.lengths_or_none()
    return cast(torch.Tensor, features.offsets()[:0] if lengths is None else lengths)


def _replaced(features: KeyedJaggedTensor, **changes: Any) -> KeyedJaggedTensor:
    parts: dict[str, Any] = {
        "keys": features.keys(),
        "values": features.values(),
        "weights": features.weights_or_none(),
        "lengths": features.lengths_or_none(),
        "offsets": features.offsets_or_none(),
        "inverse_indices": features.inverse_indices_or_none(),
    }
    if "stride_per_key_per_rank" not in changes:
        if features.variable_stride_per_key():
            parts["stride_per_key_per_rank"] = features.stride_per_key_per_rank()
        else:
            parts["stride"] = features.stride()
    return KeyedJaggedTensor(**{**parts, **changes})
