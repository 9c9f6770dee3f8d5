"""What a collection needs of a batch, and errors that name the features that lack it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_flowtt.shapes.arguments import quoted_names


class BatchRequirements:
    """Checks of a batch's ``KeyedJaggedTensor`` against the tables of a collection.

    :meth:`check_form` looks at names, dtypes and sizes only, :meth:`check_lengths` at what TorchRec
    brings to the host anyway; they are meant for every batch. :meth:`explain` reads the tensors,
    which only a lookup that has failed is worth.

    Args:
        configs: the tables.
        is_weighted: whether the collection uses per-sample weights; ``None`` for sequence
            embeddings, where there is no such choice and weights are not looked at.
    """

    def __init__(self, configs: Iterable[BaseEmbeddingConfig], is_weighted: bool | None) -> None:
        """Builds it; see the class for the arguments."""
        self.is_weighted = is_weighted
        #: Whether batches may lack weights, because feature processors make them.
        self.weights_come_later = False
        self._warned_of_weights = False
        self._tables: dict[str, list[str]] = {}
        self._table_names: list[str] = []
        for config in configs:
            self._table_names.append(config.name)
            for feature in config.feature_names:
                self._tables.setdefault(feature, []).append(config.name)

    def check_form(self, features: KeyedJaggedTensor, first_keys: list[str] | None = None) -> None:
        """Refuses weights, keys and values that cannot be looked up.

        Args:
            features: the batch.
            first_keys: as in :meth:`check_keys`.

        Raises:
            KeyError: a feature is missing.
            TypeError: weights or values have a wrong dtype.
            ValueError: anything else is wrong.
        """
        self._check_weights(features)
        self.check_keys(features.keys(), first_keys)
        self._check_values(features)

    def _check_weights(self, features: KeyedJaggedTensor) -> None:
        """Refuses missing or unusable weights; warns, once, of weights that are not used.

        Raises:
            TypeError: the weights are no floating-point numbers.
            ValueError: there are none, or not one a value.
        """
        weights = features.weights_or_none()
        if self.is_weighted is None:
            return
        if not self.is_weighted:
            if weights is not None:
                self._warn_of_unused_weights()
            return
        if weights is None:
            if self.weights_come_later:
                return
            raise ValueError(
                f"{self.label}: weights expected, as is_weighted=True, got a KeyedJaggedTensor "
                "without weights"
            )
        if not weights.is_floating_point():
            raise TypeError(
                f"{self.label}: weights must have a floating-point dtype, got {weights.dtype}"
            )
        if weights.numel() != features.values().numel():
            raise ValueError(
                f"{self.label}: weights must have one element a value, "
                f"{features.values().numel()}, got {weights.numel()}"
            )

    def _warn_of_unused_weights(self) -> None:
        if self._warned_of_weights or torch.compiler.is_compiling():
            return
        self._warned_of_weights = True
        warnings.warn(
            f"{self.label}: the weights of the KeyedJaggedTensor are not used, as "
            "is_weighted=False; build the collection with is_weighted=True to use them",
            stacklevel=2,
        )

    def check_keys(self, keys: list[str], first_keys: list[str] | None = None) -> None:
        """Refuses keys that occur twice, or that lack a feature which a table reads.

        Args:
            keys: those of the batch.
            first_keys: those of the first batch, where features are found by their position in it.

        Raises:
            KeyError: a feature is missing.
            ValueError: a key occurs twice, or a feature is at another position than in the first
                batch.
        """
        if keys == first_keys:
            return
        present = set(keys)
        if len(present) < len(keys):
            repeated = list(dict.fromkeys(key for key in keys if keys.count(key) > 1))
            raise ValueError(
                f"{self._named(repeated[0])}: the keys of the KeyedJaggedTensor must differ, got "
                f"{quoted_names(repeated)} more than once"
            )
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

    def _check_values(self, features: KeyedJaggedTensor) -> None:
        """Refuses values that are no ids.

        Raises:
            TypeError: they are no int32 or int64.
            ValueError: they are not one-dimensional.
        """
        values = features.values()
        if values.dim() != 1:
            raise ValueError(f"{self.label}: values must be 1-D, got shape {tuple(values.shape)}")
        if values.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{self.label}: values must be int32 or int64, got {values.dtype}")

    def check_lengths(self, features: KeyedJaggedTensor) -> None:
        """Refuses lengths that do not sum up to the number of values, on the CPU negative ones too.

        Without it the lookups, or the exchange before them, would read beyond the values.

        Raises:
            ValueError: the lengths are wrong.
        """
        if torch.compiler.is_compiling():
            return
        on_cpu = features.values().device.type == "cpu"
        # TorchRec splits the values by these sums, and keeps them: nothing waits for a GPU here
        # that would not wait a moment later.
        count = sum(features.length_per_key())
        if count == features.values().numel() and not (on_cpu and (features.lengths() < 0).any()):
            return
        if on_cpu:
            self._explain_lengths(features)
        raise ValueError(
            f"{self.label}: lengths must sum up to the number of values, "
            f"{features.values().numel()}, got {count}"
        )

    def explain(self, features: object, error: Exception) -> None:
        """Raises what is wrong with a batch for which `error` was raised, if that can be seen.

        Raises:
            KeyError, TypeError, ValueError: what is wrong, with the names of features and tables.
        """
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return  # what is looked at below are values, which a trace does not have
        if isinstance(features, KeyedJaggedTensor):
            self.check_form(features)
            self._explain_lengths(features)
        elif isinstance(error, AttributeError):
            raise TypeError(
                f"{self.label}: expected a KeyedJaggedTensor, got {type(features).__name__}"
            ) from error

    def _explain_lengths(self, features: KeyedJaggedTensor) -> None:
        keys, offsets = features.keys(), features.offsets_or_none()
        lengths = features.lengths_or_none()
        count = offsets.numel() - 1 if lengths is None else lengths.numel()
        if features.variable_stride_per_key():
            bags = features.stride_per_key()
        elif count % len(keys) != 0:
            raise ValueError(
                f"{self.label}: lengths must have the same number of bags for each of the "
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
                f"{self.label}: lengths must sum up to the number of values, "
                f"{features.values().numel()}, got {sum(sums)}: {by_feature}"
                f"{', ..' if len(keys) > 8 else ''}"
            )

    def _named(self, feature: str) -> str:
        tables = self._tables.get(feature, [])
        if not tables:
            return f"feature {feature!r}"
        return f"feature {feature!r} of table{'s' * (len(tables) > 1)} {quoted_names(tables)}"

    @property
    def label(self) -> str:
        """How messages call a batch as a whole: its features, and their tables."""
        features, tables = quoted_names(list(self._tables)), quoted_names(self._table_names)
        return f"features {features} of tables {tables}"
