"""What the lookup benchmark looks up: named workloads, variants of them, and their batches."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from zipf_lookups import ZipfLookups, draw_zipf_lookups

from torchrec_flowtt.shapes import TTSpec

_NAMES = {
    "pooling": ("sum", "mean"),
    "index_dtype": ("int64", "int32"),
    "output_dtype": ("float32", "float16", "bfloat16"),
}


@dataclasses.dataclass(frozen=True)
class Workload:
    """Tables of one shape, each looked up by one feature, in one call.

    Attributes:
        name: as in the results.
        num_embeddings: rows N of every table.
        embedding_dim: columns D of every table.
        p_shapes: row factors; None lets `TTSpec.suggest` choose.
        q_shapes: column factors; None lets `TTSpec.suggest` choose.
        tt_ranks: inner ranks.
        batch_size: bags B of every table.
        pooling_factor: lookups L of every bag.
        alpha: exponent of the Zipf law of the rows, spread over the table; 0 is uniform.
        tables: their number T.
        prefix_share: this share of the lookups goes to rows of a single prefix (to rows that
            differ in the last digit alone).
        weighted: with per-sample weights.
        pooling: "sum" or "mean".
        index_dtype: "int64" or "int32", of indices and offsets.
        output_dtype: "float32", "float16" or "bfloat16".

    Raises:
        ValueError: a number is out of range, a name is unknown, or there is no TT table of the
            shape.
    """

    name: str
    num_embeddings: int = 10_000_000
    embedding_dim: int = 128
    p_shapes: tuple[int, ...] | None = (200, 220, 250)
    q_shapes: tuple[int, ...] | None = (4, 4, 8)
    tt_ranks: tuple[int, ...] = (32, 32)
    batch_size: int = 65_536
    pooling_factor: int = 1
    alpha: float = 0.0
    tables: int = 1
    prefix_share: float = 0.0
    weighted: bool = False
    pooling: str = "sum"
    index_dtype: str = "int64"
    output_dtype: str = "float32"

    def __post_init__(self) -> None:
        """Validates."""
        for field in ("num_embeddings", "embedding_dim", "batch_size", "pooling_factor", "tables"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"alpha must be finite and at least 0, got {self.alpha}")
        if not 0 <= self.prefix_share <= 1:
            raise ValueError(f"prefix_share must be 0 to 1, got {self.prefix_share}")
        for field, valid in _NAMES.items():
            if getattr(self, field) not in valid:
                names = ", ".join(valid)
                raise ValueError(f"{field} must be one of {names}, got {getattr(self, field)}")
        _ = self.spec

    @property
    def spec(self) -> TTSpec:
        """Shape of each table."""
        return TTSpec.suggest(
            self.num_embeddings,
            self.embedding_dim,
            tt_ranks=self.tt_ranks,
            p_shapes=self.p_shapes,
            q_shapes=self.q_shapes,
            name=self.name,
        )

    @property
    def num_lookups(self) -> int:
        """Of a batch, over all tables."""
        return self.tables * self.batch_size * self.pooling_factor

    @property
    def output_shape(self) -> tuple[int, int]:
        """``(B, T * D)``."""
        return self.batch_size, self.tables * self.embedding_dim

    @property
    def output_torch_dtype(self) -> torch.dtype:
        """`output_dtype` as torch has it."""
        dtype: torch.dtype = getattr(torch, self.output_dtype)
        return dtype

    @property
    def uniform_twin(self) -> Workload:
        """The same without a prefix that has a share of its own; its name is of no account."""
        return dataclasses.replace(self, name="", prefix_share=0.0)

    def variant(self, **changes: object) -> Workload:
        """This workload with other values, which its name then tells.

        The factors of a changed number of rows, columns or cores are suggested anew unless given.
        """
        changes = {key: value for key, value in changes.items() if value != getattr(self, key)}
        if not changes:
            return self
        shown = ",".join(
            f"{key}={'x'.join(map(str, value)) if isinstance(value, tuple) else value}"
            for key, value in changes.items()
        )
        other_cores = len(changes.get("tt_ranks", self.tt_ranks)) != len(self.tt_ranks)
        if other_cores or "num_embeddings" in changes:
            changes.setdefault("p_shapes", None)
        if other_cores or "embedding_dim" in changes:
            changes.setdefault("q_shapes", None)
        return dataclasses.replace(self, name=f"{self.name}:{shown}", **changes)


_NARROW = {"embedding_dim": 64, "q_shapes": (4, 4, 4), "tt_ranks": (16, 16), "alpha": 1.05}

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1"),
        Workload("W1-skew", prefix_share=0.3),  # next to W1, which is the same batch but uniform
        Workload("W2p", alpha=1.05),
        Workload("W3p", batch_size=8192, pooling_factor=20, alpha=1.05),
        Workload("W5p", **_NARROW),
        Workload("W6p", **_NARROW, tables=8, batch_size=8192, pooling_factor=10),
        Workload("serving", batch_size=256),
    )
}


@dataclasses.dataclass(frozen=True)
class Batch:
    """One call's lookups; the features' bags follow one another.

    Attributes:
        indices: ``[T * B * L]``.
        offsets: ``[T * B + 1]``.
        per_sample_weights: ``[T * B * L]`` float32, or None.
    """

    indices: Tensor
    offsets: Tensor
    per_sample_weights: Tensor | None

    def of_tables(self, workload: Workload) -> tuple[Tensor, Tensor | None]:
        """Indices and weights as ``[T, B, L]``."""
        shape = (workload.tables, workload.batch_size, workload.pooling_factor)
        weights = self.per_sample_weights
        return self.indices.view(shape), None if weights is None else weights.view(shape)


def draw_batch(workload: Workload, seed: int, device: torch.device) -> Batch:
    """The lookups of one seed."""
    lookups = ZipfLookups(
        workload.num_embeddings, workload.batch_size, workload.pooling_factor, workload.alpha
    )
    seeds = range(seed * workload.tables, (seed + 1) * workload.tables)
    indices = torch.cat([draw_zipf_lookups(lookups, table_seed)[0] for table_seed in seeds])
    generator = torch.Generator().manual_seed(seed)
    if workload.prefix_share > 0:
        rows_per_prefix = workload.spec.p_shapes[-1]
        prefix = workload.num_embeddings // rows_per_prefix // 2
        chosen = torch.rand(indices.shape, generator=generator) < workload.prefix_share
        rows = torch.randint(rows_per_prefix, indices.shape, generator=generator)
        indices = torch.where(chosen, prefix * rows_per_prefix + rows, indices)
    offsets = torch.arange(0, workload.num_lookups + 1, workload.pooling_factor)
    weights = torch.rand(indices.shape, generator=generator) if workload.weighted else None
    dtype = getattr(torch, workload.index_dtype)
    return Batch(
        indices.to(device, dtype),
        offsets.to(device, dtype),
        None if weights is None else weights.to(device),
    )


@dataclasses.dataclass(frozen=True)
class Distinct:
    """Distinct parts of the batches of a workload; means over the batches, sums over the tables.

    Attributes:
        spans: of digits a .. b, by ``(a, b)`` with 0 <= a <= b < d.
    """

    spans: dict[tuple[int, int], float]

    @property
    def prefixes(self) -> list[float]:
        """Of k = 1 .. d digits; the last are distinct rows."""
        return [count for (first, _), count in sorted(self.spans.items()) if first == 0]

    @property
    def slices(self) -> list[float]:
        """Of core k = 1 .. d."""
        return [count for (first, last), count in sorted(self.spans.items()) if first == last]

    @property
    def rows(self) -> float:
        """Distinct rows."""
        return self.prefixes[-1]


def count_distinct(workload: Workload, batches: list[Batch]) -> Distinct:
    """Counts the distinct values of every run of digits."""
    p_shapes = workload.spec.p_shapes
    spans = {(a, b): 0.0 for b in range(len(p_shapes)) for a in range(b + 1)}
    for batch in batches:
        for looked_up in batch.of_tables(workload)[0].unbind():
            rows = looked_up.unique()
            for a, b in spans:
                digits = rows // math.prod(p_shapes[b + 1 :]) % math.prod(p_shapes[a : b + 1])
                spans[a, b] += digits.unique().numel() / len(batches)
    return Distinct(spans)
