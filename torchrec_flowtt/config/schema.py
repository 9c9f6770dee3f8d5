"""The configuration of the training job as frozen pydantic models: every key, type and default."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _not_empty(value: object) -> object:
    if value == "":
        raise ValueError("must not be empty")
    return value


# Strict: neither true nor "3" is a number.
PositiveInt = Annotated[int, Field(strict=True, gt=0, lt=2**31)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
# Far beyond any use, and small enough that no product of two sizes overflows.
LargeInt = Annotated[int, Field(strict=True, gt=0, le=2**40)]
LayerWidth = Annotated[int, Field(strict=True, gt=0, le=2**14)]
Rank = Annotated[int, Field(strict=True, gt=0, le=2**16)]
Number = Annotated[float, Field(strict=True)]
PositiveNumber = Annotated[float, Field(strict=True, gt=0.0)]
NotNegative = Annotated[float, Field(strict=True, ge=0.0)]
Fraction = Annotated[float, Field(strict=True, gt=0.0, lt=1.0)]
# An empty path would mean the current folder.
PlacePath = Annotated[Path, BeforeValidator(_not_empty)]

SPARSE_OPTIMIZERS = ("sgd", "adagrad", "row_wise_adagrad", "adam")


class FrozenModel(BaseModel):
    """A model that refuses unknown keys and assignment."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TableRule(FrozenModel):
    """How the tables that match ``name`` are stored; the first rule that matches a table wins.

    Attributes:
        name: a table's name or a glob (``cross_*``).
        kernel: ``flowtt`` (TT cores) or ``fbgemm`` (an uncompressed table).
        tt_ranks: inner ranks, one number for all or one a joint (``num_cores - 1`` of them).
        max_bytes: in place of ``tt_ranks``, the most bytes that the fp32 cores may take; the
            largest rank that fits is used.
        num_cores: 2 to 4; left out, taken from the other fields, else 3.
        p_shapes: row factors, ``num_cores`` of them, product >= rows.
        q_shapes: column factors, ``num_cores`` of them, product == embedding dimension.
        sharding: ``auto`` leaves it to the planner; TT tables know ``table_wise`` and
            ``data_parallel`` only.

    The TT fields of a rule whose kernel is ``fbgemm`` are ignored, so that one override
    (``tables.cross_*.kernel=fbgemm``) is enough to compare the two.
    """

    name: Annotated[str, Field(min_length=1)]
    kernel: Literal["flowtt", "fbgemm"] = "fbgemm"
    tt_ranks: Rank | tuple[Rank, ...] | None = None
    max_bytes: LargeInt | None = None
    num_cores: Annotated[int, Field(strict=True, ge=2, le=4)] | None = None
    p_shapes: tuple[LargeInt, ...] | None = None
    q_shapes: tuple[PositiveInt, ...] | None = None
    sharding: Literal["auto", "table_wise", "data_parallel", "row_wise", "column_wise"] = "auto"

    @model_validator(mode="after")
    def _lengths_agree(self) -> TableRule:
        if self.kernel == "fbgemm":
            return self
        if (self.tt_ranks is None) == (self.max_bytes is None):
            raise ValueError("kernel flowtt needs tt_ranks or max_bytes, and only one of them")
        cores = self.resolved_num_cores
        if not 2 <= cores <= 4:
            raise ValueError(f"{cores} cores follow from its lists; 2 to 4 are possible")
        ranks = self.tt_ranks
        if isinstance(ranks, tuple) and len(ranks) != cores - 1:
            raise ValueError(
                f"tt_ranks has {len(ranks)} numbers, {cores} cores need {cores - 1} inner ranks"
            )
        for key, factors in (("p_shapes", self.p_shapes), ("q_shapes", self.q_shapes)):
            if factors is not None and len(factors) != cores:
                raise ValueError(f"{key} has {len(factors)} factors, num_cores is {cores}")
        if self.sharding not in ("auto", "table_wise", "data_parallel"):
            raise ValueError(
                f"sharding {self.sharding} does not exist for kernel flowtt;"
                " use auto, table_wise or data_parallel"
            )
        return self

    @property
    def resolved_num_cores(self) -> int:
        """``num_cores``, or what the lists given imply, or 3."""
        if self.num_cores is not None:
            return self.num_cores
        if self.p_shapes is not None:
            return len(self.p_shapes)
        if self.q_shapes is not None:
            return len(self.q_shapes)
        if isinstance(self.tt_ranks, tuple):
            return len(self.tt_ranks) + 1
        return 3

    @property
    def resolved_tt_ranks(self) -> tuple[int, ...] | None:
        """The ``num_cores - 1`` inner ranks, or None when ``max_bytes`` chooses them."""
        if isinstance(self.tt_ranks, int):
            return (self.tt_ranks,) * (self.resolved_num_cores - 1)
        return self.tt_ranks


class DataConfig(FrozenModel):
    """Where the interactions come from and how they become features; see docs/data.md.

    ``rating_statistics`` are dense features made of earlier ratings: ``none``, the ``user``'s own,
    or ``all``, which alone predict so well that the tables have nothing left to learn.
    """

    path: PlacePath | None = None
    name: Annotated[str, Field(min_length=1)] = "ml-100k"
    cache_dir: PlacePath | None = None
    positive_rating: Number = 4.0
    validation_fraction: Fraction = 0.1
    test_fraction: Fraction = 0.1
    history_length: PositiveInt = 20
    cross_rows: LargeInt = 2**20
    rating_statistics: Literal["none", "user", "all"] = "user"

    @model_validator(mode="after")
    def _something_is_left_to_train_on(self) -> DataConfig:
        if self.validation_fraction + self.test_fraction >= 1.0:
            raise ValueError("validation_fraction + test_fraction must be less than 1")
        return self


class ModelConfig(FrozenModel):
    """The DLRM: the dimension all its tables share, and the widths of its two MLPs."""

    embedding_dim: LayerWidth = 16
    dense_layers: Annotated[tuple[LayerWidth, ...], Field(min_length=1)] = (64, 16)
    over_layers: Annotated[tuple[LayerWidth, ...], Field(min_length=2)] = (64, 1)
    pooling: Literal["sum", "mean"] = "mean"

    @model_validator(mode="after")
    def _mlps_fit(self) -> ModelConfig:
        if self.embedding_dim % 4:
            raise ValueError(
                f"embedding_dim must be a multiple of 4 for FBGEMM's tables, not"
                f" {self.embedding_dim}"
            )
        if self.dense_layers[-1] != self.embedding_dim:
            raise ValueError(
                f"dense_layers must end in embedding_dim = {self.embedding_dim},"
                f" not {self.dense_layers[-1]}"
            )
        if self.over_layers[-1] != 1:
            raise ValueError(f"over_layers must end in 1, not {self.over_layers[-1]}")
        return self


class SparseOptimizerConfig(FrozenModel):
    """The optimizer fused into the tables' backward pass; only ``adam`` has a weight decay."""

    name: Literal["sgd", "adagrad", "row_wise_adagrad", "adam"] = "row_wise_adagrad"
    learning_rate: PositiveNumber = 0.05
    eps: PositiveNumber = 1e-8
    weight_decay: NotNegative = 0.0

    @model_validator(mode="after")
    def _decay_exists(self) -> SparseOptimizerConfig:
        if self.weight_decay and self.name != "adam":
            raise ValueError(
                f"weight_decay {self.weight_decay} is for adam only, {self.name} has none; set it"
                " to 0"
            )
        return self


class DenseOptimizerConfig(FrozenModel):
    """The optimizer of the MLPs and of data-parallel tables."""

    name: Literal["sgd", "adagrad", "adam"] = "adam"
    learning_rate: PositiveNumber = 1e-3
    weight_decay: NotNegative = 0.0


class OptimizerConfig(FrozenModel):
    """The two optimizers."""

    sparse: SparseOptimizerConfig = SparseOptimizerConfig()
    dense: DenseOptimizerConfig = DenseOptimizerConfig()


class TrainConfig(FrozenModel):
    """The length of the run and its step.

    ``batch_size`` counts the examples of one step over all ranks, so that the run does not depend
    on the number of processes; it must be a multiple of that number.
    """

    epochs: PositiveInt = 5
    batch_size: PositiveInt = 1024
    log_every: PositiveInt = 10


class CheckpointConfig(FrozenModel):
    """When checkpoints are written and where; the last one of a run is always written.

    ``folder`` defaults to ``checkpoints`` in the run folder; ``every_epochs`` and ``every_steps``
    of 0 turn those checkpoints off; the newest ``keep`` stay.
    """

    folder: PlacePath | None = None
    every_epochs: Count = 1
    every_steps: Count = 0
    keep: PositiveInt = 2


class JobConfig(FrozenModel):
    """The whole configuration of one training run.

    >>> JobConfig(tables=[{"name": "cross_*", "kernel": "fbgemm"}]).tables[0].sharding
    'auto'
    """

    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    run_folder: PlacePath = Path("runs/movielens")
    data: DataConfig = DataConfig()
    tables: tuple[TableRule, ...] = ()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _q_shapes_fit(self) -> JobConfig:
        dim = self.model.embedding_dim
        for rule in self.tables:
            if (
                rule.kernel == "flowtt"
                and rule.q_shapes is not None
                and math.prod(rule.q_shapes) != dim
            ):
                raise ValueError(
                    f"tables.{rule.name}.q_shapes: {list(rule.q_shapes)} multiply to"
                    f" {math.prod(rule.q_shapes)}, model.embedding_dim is {dim}"
                )
        return self

    @property
    def checkpoint_folder(self) -> Path:
        """Where checkpoints go."""
        folder = self.checkpoint.folder
        return self.run_folder / "checkpoints" if folder is None else folder
