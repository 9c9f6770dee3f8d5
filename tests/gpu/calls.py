"""Operator calls made up for the GPU tests: tables, bags and weights of a given make."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import torchrec_flowtt.ops  # noqa: F401  (registers the operators)

SUM, MEAN = 0, 1


@dataclasses.dataclass(frozen=True)
class Table:
    """Shape of one table; N defaults to the product of p."""

    p: tuple[int, ...]
    q: tuple[int, ...]
    ranks: tuple[int, ...]
    num_embeddings: int = 0

    @property
    def rows(self) -> int:
        return self.num_embeddings or math.prod(self.p)

    @property
    def dim(self) -> int:
        return math.prod(self.q)

    @property
    def core_shapes(self) -> list[tuple[int, int, int, int]]:
        bonds = (1, *self.ranks, 1)
        return [(self.p[k], bonds[k], self.q[k], bonds[k + 1]) for k in range(len(self.p))]


@dataclasses.dataclass
class Call:
    """The tensors and lists of one call, in the operators' order."""

    cores: list[Tensor]
    indices: Tensor
    offsets: Tensor
    per_sample_weights: Tensor | None
    cores_per_table: list[int]
    num_embeddings: list[int]
    feature_table_map: list[int]
    pooling_mode: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @property
    def batch_size(self) -> int:
        return (self.offsets.numel() - 1) // len(self.feature_table_map)

    @property
    def total_columns(self) -> int:
        return sum(self.dims[table] for table in self.feature_table_map)

    @property
    def dims(self) -> list[int]:
        return [math.prod(core.shape[2] for core in cores) for cores in self.cores_of_tables()]

    def cores_of_tables(self, cores: Sequence[Tensor] | None = None) -> list[list[Tensor]]:
        """The flat list of cores (or of anything that has one entry per core) by table."""
        remaining = iter(self.cores if cores is None else cores)
        return [[next(remaining) for _ in range(count)] for count in self.cores_per_table]

    def to(self, device: torch.device | str) -> Call:
        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device, copy=True)
            if isinstance(value, list):
                return [move(item) for item in value]
            return value

        return Call(*(move(value) for value in self.arguments))

    def forward(self, output_dtype: torch.dtype | None = None, allow_tf32: bool = False) -> Tensor:
        output_dtype = output_dtype or accumulation_dtype(self.cores[0].dtype)
        return torch.ops.flowtt.tt_embedding_bag(*self.arguments, output_dtype, allow_tf32)

    def backward(self, grad: Tensor) -> list[Tensor]:
        return torch.ops.flowtt.tt_embedding_bag_backward(grad, *self.arguments)

    def weights_grad(self, grad: Tensor) -> Tensor:
        return torch.ops.flowtt.tt_embedding_bag_weights_grad(grad, *self.arguments)

    def grad_output(self, dtype: torch.dtype | None = None, seed: int = 1) -> Tensor:
        """A Gaussian gradient of the output, the same for every device."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.batch_size, self.total_columns)
        grad = torch.randn(shape, generator=generator, dtype=torch.float64)
        dtype = dtype or accumulation_dtype(self.cores[0].dtype)
        return grad.to(dtype).to(self.cores[0].device)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64 cores."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def make_call(
    tables: Sequence[Table],
    *,
    feature_table_map: Sequence[int] | None = None,
    batch_size: int = 5,
    max_length: int = 4,
    lengths: Sequence[int] | None = None,
    ids: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int64,
    offset_dtype: torch.dtype = torch.int64,
    weighted: bool = False,
    pooling_mode: int = SUM,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Call:
    """Random cores with rows of variance about 1, and random bags (empty ones among them).

    ``lengths`` (feature-major) and ``ids`` fix what would be drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    features = list(range(len(tables)) if feature_table_map is None else feature_table_map)
    cores = [
        torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[1])
        for table in tables
        for shape in table.core_shapes
    ]
    if lengths is None:
        drawn = torch.randint(0, max_length + 1, (len(features) * batch_size,), generator=generator)
    else:
        drawn = torch.tensor(lengths, dtype=torch.int64)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), drawn.cumsum(0)])
    if ids is None:
        per_feature = drawn.reshape(len(features), -1).sum(1).tolist()
        indices = torch.cat(
            [
                torch.randint(0, tables[table].rows, (count,), generator=generator)
                for table, count in zip(features, per_feature, strict=True)
            ]
        )
    else:
        indices = torch.tensor(ids, dtype=torch.int64)
    weights = None
    if weighted:
        weights = torch.randn(indices.numel(), generator=generator, dtype=torch.float64)
        weights = weights.to(accumulation_dtype(dtype))
    call = Call(
        [core.to(dtype) for core in cores],
        indices.to(index_dtype),
        offsets.to(offset_dtype),
        weights,
        [len(table.p) for table in tables],
        [table.rows for table in tables],
        features,
        pooling_mode,
    )
    return call.to(device)
