"""The configurations of one TT-compressed table, with pooling and without."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torchrec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    data_type_to_dtype,
)

from torchrec_flowtt.shapes import TTSpec

_DATA_TYPES = (DataType.FP32, DataType.FP16, DataType.BF16)
_REFUSED_FIELDS = (
    "num_embeddings_post_pruning",
    "use_virtual_table",
    "enable_embedding_update",
    "stash_weights",
)


@dataclass(frozen=True)
class _NoDenseWeight:
    """Stands in for ``init_fn``: it is called only where an N x D weight was made by mistake."""

    table: str
    config: str
    collection: str

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        if weight.is_meta:
            # Nothing is initialised; TorchRec's EmbeddingCollection calls this there too.
            return weight
        raise TypeError(
            f"table {self.table!r} is a TT table ({self.config}), but an uncompressed "
            "weight is about to be initialised for it. Build the collection with "
            f"FlowTT{self.collection} instead of {self.collection}, and shard it with "
            f"FlowTT{self.collection}Sharder."
        )


@dataclass
class TTTableConfig(BaseEmbeddingConfig):
    """What the configurations of TT tables share: the TT-shape and the checks of the fields.

    Base of :class:`FlowTTEmbeddingBagConfig` and :class:`FlowTTEmbeddingConfig`, which say what the
    fields mean.
    """

    tt_ranks: int | Sequence[int] | None = None
    num_cores: int | None = None
    p_shapes: Sequence[int] | None = None
    q_shapes: Sequence[int] | None = None
    tt_spec: TTSpec = field(init=False, repr=False)

    _collection: ClassVar[str]

    def __post_init__(self) -> None:
        """Check the fields and resolve the TT-shape."""
        init_fn: Any = getattr(self, "init_fn", None)
        if init_fn is not None and not isinstance(init_fn, _NoDenseWeight):
            raise ValueError(
                f"table {self.name!r}: init_fn initialises an N x D weight, which a TT table does "
                "not have; set weight_init_min and weight_init_max instead"
            )
        self.init_fn = _NoDenseWeight(self.name, type(self).__name__, self._collection)
        super().__post_init__()
        names = self.feature_names
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"table {self.name!r}: feature_names must be a list of strings, got {names!r}"
            )
        # First, as the range of initial weights that is read below depends on num_embeddings.
        self.tt_spec = self._resolve_spec()
        self.num_cores = self.tt_spec.num_cores
        for name in _REFUSED_FIELDS:
            if getattr(self, name, None):
                raise ValueError(
                    f"table {self.name!r}: {name}={getattr(self, name)!r} is not supported for a "
                    "TT table"
                )
        if self.data_type not in _DATA_TYPES:
            raise ValueError(
                f"table {self.name!r}: data_type must be FP32, FP16 or BF16 for a TT table, got "
                f"{self.data_type}"
            )
        self._check_pooling()
        low, high = self.get_weight_init_min(), self.get_weight_init_max()
        if not low < high:
            raise ValueError(
                f"table {self.name!r}: weight_init_min must be below weight_init_max, got "
                f"{low} and {high}"
            )
        self._warn_of_wasteful_ranks()

    def _check_pooling(self) -> None:
        """Refuses a pooling that TT tables do not have."""

    def _resolve_spec(self) -> TTSpec:
        if self.tt_ranks is None:
            raise ValueError(
                f"table {self.name!r}: a TT table needs tt_ranks, one number or one for each inner "
                "bond, for example tt_ranks=(32, 32)"
            )
        return TTSpec.suggest(
            self.num_embeddings,
            self.embedding_dim,
            tt_ranks=self.tt_ranks,
            num_cores=self.num_cores,
            p_shapes=self.p_shapes,
            q_shapes=self.q_shapes,
            name=self.name,
        )

    def _warn_of_wasteful_ranks(self) -> None:
        spec, useful = self.tt_spec, self.tt_spec.max_useful_ranks
        elements = self.num_embeddings * self.embedding_dim
        if spec.num_parameters >= elements:
            fault = "save nothing"
        elif any(rank > limit for rank, limit in zip(spec.tt_ranks, useful, strict=True)):
            fault = "are higher than needed"
        else:
            return
        warnings.warn(
            f"TT table {self.name!r} of {self.num_embeddings} x {self.embedding_dim}: tt_ranks "
            f"{spec.tt_ranks} {fault}. The cores hold {spec.num_parameters} elements, the "
            f"uncompressed table would hold {elements}, and ranks {useful} represent any table of "
            "this shape exactly.",
            stacklevel=4,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of the cores."""
        dtype: torch.dtype = data_type_to_dtype(self.data_type)
        return dtype

    @property
    def init_variance(self) -> float:
        """Second moment of an element of the table under ``uniform(weight_init_min, _max)``."""
        return init_variance(self)


@dataclass
class FlowTTEmbeddingBagConfig(TTTableConfig, EmbeddingBagConfig):
    """An :class:`~torchrec.modules.embedding_configs.EmbeddingBagConfig` stored as TT-cores.

    The shape is checked when the configuration is built, on every rank alike, and is available as
    :attr:`tt_spec`.

    Args:
        tt_ranks: inner TT-ranks ``(r_1, ..., r_(d-1))``, or one number for all of them. Required.
        num_cores: number of TT-cores d, 2 to 4; by default what the other arguments imply, else 3.
        p_shapes: row factors, ``prod(p_shapes) >= num_embeddings``; ``None`` chooses balanced ones.
        q_shapes: column factors, ``prod(q_shapes) == embedding_dim``; ``None`` chooses balanced
            ones.

    ``weight_init_min`` and ``weight_init_max`` keep their meaning: the cores are initialised so
    that the elements of the table they stand for have the second moment of that uniform
    distribution.

    Raises:
        TypeError: if `feature_names` is no list of strings.
        ValueError: if the TT-shape does not fit the table, or a field is set that a TT table
            cannot honour (an ``init_fn`` of one's own, an 8-bit data type, virtual tables,
            pruning).

    Warns:
        UserWarning: if the cores hold no fewer elements than the uncompressed table, or a rank is
            higher than any table of this shape can need.

    Example:
        >>> config = FlowTTEmbeddingBagConfig(
        ...     name="ads", num_embeddings=10_000, embedding_dim=16, feature_names=["ad_id"],
        ...     tt_ranks=(8, 8), p_shapes=(20, 20, 25), q_shapes=(2, 2, 4))
        >>> config.tt_spec.core_shapes
        ((20, 1, 2, 8), (20, 8, 2, 8), (25, 8, 4, 1))
    """

    _collection: ClassVar[str] = "EmbeddingBagCollection"

    def _check_pooling(self) -> None:
        if self.pooling not in (PoolingType.SUM, PoolingType.MEAN):
            raise ValueError(
                f"table {self.name!r}: pooling must be SUM or MEAN, got {self.pooling}"
            )


@dataclass
class FlowTTEmbeddingConfig(TTTableConfig, EmbeddingConfig):
    """An :class:`~torchrec.modules.embedding_configs.EmbeddingConfig` stored as TT-cores.

    The arguments that it has besides TorchRec's, the checks and their errors are those of
    :class:`FlowTTEmbeddingBagConfig`.

    Example:
        >>> config = FlowTTEmbeddingConfig(
        ...     name="items", num_embeddings=10_000, embedding_dim=16, feature_names=["item_id"],
        ...     tt_ranks=(8, 8), p_shapes=(20, 20, 25), q_shapes=(2, 2, 4))
        >>> config.tt_spec.core_shapes
        ((20, 1, 2, 8), (20, 8, 2, 8), (25, 8, 4, 1))
    """

    _collection: ClassVar[str] = "EmbeddingCollection"


def init_variance(table: BaseEmbeddingConfig) -> float:
    """Second moment of an element under ``uniform(weight_init_min, weight_init_max)``.

    For a user's configuration of a table and for the one TorchRec makes of it when sharding.
    """
    low, high = float(table.get_weight_init_min()), float(table.get_weight_init_max())
    return (low * low + low * high + high * high) / 3.0
