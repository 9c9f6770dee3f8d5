"""What a collection needs of a batch, and errors that name the features that lack it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_flowtt.shapes.arguments import quoted_names


class BatchRequirements:
    """Checks of a batch's ``KeyedJaggedTensor`` against the tables of a collection.

    :meth:`check_weights` and :meth:`check_keys` look at names, dtypes and sizes only and are meant
    for every batch. :meth:`explain` reads the tensors, which only a lookup that has failed is
    worth.

    Args:
        configs: the tables.
        is_weighted: whether the collection takes per-sample weights.
    """

    def __init__(self, configs: Iterable[EmbeddingBagConfig], is_weighted: bool) -> None:
        """Builds it; see the class for the arguments."""
        self._is_weighted = is_weighted
        self._tables: dict[str, list[str]] = {}
        self._table_names: list[str] = []
        for config in configs:
            self._table_names.append(config.name)
            for feature in config.feature_names:
                self._tables.setdefault(feature, []).append(config.name)

    def check_weights(self, features: KeyedJaggedTensor) -> None:
        """Refuses weights where the collection takes none, and missing or unusable ones.

        TorchRec would ignore some of these, and let others change uncompressed tables only or read
        beyond a tensor.

        Raises:
            TypeError: the weights are no floating-point numbers.
            ValueError: any other mismatch.
        """
        weights = features.weights_or_none()
        if weights is None and not self._is_weighted:
            return
        if weights is None:
            raise ValueError(
                f"{self._all()}: weights expected, as is_weighted=True, got a KeyedJaggedTensor "
                "without weights"
            )
        if not self._is_weighted:
            raise ValueError(
                f"{self._all()}: no weights expected, as is_weighted=False, got a "
                "KeyedJaggedTensor with weights; give it without them, or build the collection "
                "with is_weighted=True"
            )
        if not weights.is_floating_point():
            raise TypeError(
                f"{self._all()}: weights must have a floating-point dtype, got {weights.dtype}"
            )
        if weights.numel() != features.values().numel():
            raise ValueError(
                f"{self._all()}: weights must have one element a value, "
                f"{features.values().numel()}, got {weights.numel()}"
            )

    def check_keys(self, keys: list[str], first_keys: list[str] | None = None) -> None:
        """Refuses keys without a feature that a table reads.

        Args:
            keys: those of the batch.
            first_keys: those of the first batch, where features are found by their position in it.

        Raises:
            KeyError: a feature is missing.
            ValueError: a feature is at another position than in the first batch.
        """
        if keys == first_keys:
            return
        present = set(keys)
        missing = [self._named(feature) for feature in self._tables if feature not in present]
        if missing:
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise KeyError(
                f"{', '.join(missing[:8])}{more}: expected among the keys of the "
                f"KeyedJaggedTensor, got {quoted_names(keys)}"
            )
        if first_keys is None:
            return
        for feature in self._tables:
            position = first_keys.index(feature)
            if keys[position : position + 1] != [feature]:
                raise ValueError(
                    f"{self._named(feature)}: expected key {position} of the KeyedJaggedTensor, as "
                    "in the first batch, since a sharded collection finds features by their "
                    f"position, got key {keys.index(feature)}"
                )

    def explain(self, features: object, error: Exception) -> None:
        """Raises what is wrong with a batch for which `error` was raised, if that can be seen.

        Raises:
            KeyError, TypeError, ValueError: what is wrong, with the names of features and tables.
        """
        if isinstance(features, KeyedJaggedTensor):
            self.check_weights(features)
            self.check_keys(features.keys())
            self._check_values(features)
            self._check_lengths(features)
        elif isinstance(error, AttributeError):
            raise TypeError(
                f"{self._all()}: expected a KeyedJaggedTensor, got {type(features).__name__}"
            ) from error

    def _check_values(self, features: KeyedJaggedTensor) -> None:
        values = features.values()
        if values.dim() != 1:
            raise ValueError(f"{self._all()}: values must be 1-D, got shape {tuple(values.shape)}")
        if values.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{self._all()}: values must be int32 or int64, got {values.dtype}")

    def _check_lengths(self, features: KeyedJaggedTensor) -> None:
        keys, offsets = features.keys(), features.offsets_or_none()
        lengths = features.lengths_or_none()
        count = offsets.numel() - 1 if lengths is None else lengths.numel()
        if features.variable_stride_per_key():
            bags = features.stride_per_key()
        elif count % len(keys) != 0:
            raise ValueError(
                f"{self._all()}: lengths must have the same number of bags for each of the "
                f"{len(keys)} keys {quoted_names(keys)}, got {count} in all"
            )
        else:
            bags = [count // len(keys)] * len(keys)
        # The rest reads tensors: on a GPU, after a failed kernel, that would hide its error.
        if features.values().device.type != "cpu" or sum(bags) != count:
            return
        if offsets is not None and int(offsets[0]) != 0:
            raise ValueError(f"{self._named(keys[0])}: offsets[0] must be 0, got {int(offsets[0])}")
        of_feature = (torch.diff(offsets) if lengths is None else lengths.reshape(-1)).split(bags)
        for key, lengths in zip(keys, of_feature, strict=True):
            if (lengths < 0).any():
                bag = int((lengths < 0).int().argmax())
                raise ValueError(
                    f"{self._named(key)}: the length of bag {bag} must not be negative, got "
                    f"{int(lengths[bag])}"
                )
        sums = [int(lengths.sum()) for lengths in of_feature]
        if sum(sums) != features.values().numel():
            by_feature = ", ".join(f"{key!r} {n}" for key, n in zip(keys[:8], sums, strict=False))
            raise ValueError(
                f"{self._all()}: lengths must sum up to the number of values, "
                f"{features.values().numel()}, got {sum(sums)}: {by_feature}"
                f"{', ..' if len(keys) > 8 else ''}"
            )

    def _named(self, feature: str) -> str:
        tables = self._tables.get(feature, [])
        if not tables:
            return f"feature {feature!r}"
        return f"feature {feature!r} of table{'s' * (len(tables) > 1)} {quoted_names(tables)}"

    def _all(self) -> str:
        features, tables = quoted_names(list(self._tables)), quoted_names(self._table_names)
        return f"features {features} of tables {tables}"
