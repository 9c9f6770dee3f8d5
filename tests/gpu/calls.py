"""Operator calls made up for the GPU tests: tables, bags and weights of a given make."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import torchrec_flowtt.ops  # noqa: F401  (registers the operators)
from tests.ops.random_calls import Table, accumulation_dtype
from tests.reference import MEAN, NONE, SUM, Bags, split_tables

__all__ = ["MEAN", "NONE", "SUM", "Call", "Table", "accumulation_dtype", "make_call"]


@dataclasses.dataclass
class Call(Bags):
    """Bags together with the cores they are looked up in."""

    cores: list[Tensor]

    def operands(self) -> tuple[Any, ...]:
        """Cores and bags, in the order of the operators' schemas."""
        return (self.cores, *self.arguments())

    @property
    def output_shape(self) -> tuple[int, int]:
        """``[B, sum_f D_f]``, or ``[nnz, D]`` without pooling."""
        tables = split_tables(self.cores, self.cores_per_table)
        dims = [math.prod(core.shape[2] for core in tables[t]) for t in self.feature_table_map]
        if self.pooling_mode == NONE:
            return self.indices.numel(), dims[0]
        return self.batch_size, sum(dims)

    def to(self, device: torch.device | str) -> Call:
        """A copy on `device`."""

        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device, copy=True)
            if isinstance(value, list):
                return [move(item) for item in value]
            return value

        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Call(**{name: move(value) for name, value in fields.items()})

    def forward(
        self,
        output_dtype: torch.dtype | None = None,
        allow_tf32: bool = False,
        deterministic: bool = False,
    ) -> Tensor:
        output_dtype = output_dtype or accumulation_dtype(self.cores[0].dtype)
        return torch.ops.flowtt.tt_embedding_bag(
            *self.operands(), output_dtype, allow_tf32, deterministic
        )

    def backward(self, grad: Tensor, deterministic: bool = False) -> list[Tensor]:
        return torch.ops.flowtt.tt_embedding_bag_backward(
            grad, *self.operands(), deterministic=deterministic
        )

    def weights_grad(self, grad: Tensor) -> Tensor:
        return torch.ops.flowtt.tt_embedding_bag_weights_grad(grad, *self.operands())

    def grad_output(self, dtype: torch.dtype | None = None, seed: int = 1) -> Tensor:
        """A Gaussian gradient of the output, the same for every device."""
        generator = torch.Generator().manual_seed(seed)
        grad = torch.randn(self.output_shape, generator=generator, dtype=torch.float64)
        dtype = dtype or accumulation_dtype(self.cores[0].dtype)
        return grad.to(dtype).to(self.cores[0].device)


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
    cores = [core for table in tables for core in table.cores(dtype, generator)]
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
        cores=cores,
        indices=indices.to(index_dtype),
        offsets=offsets.to(offset_dtype),
        per_sample_weights=weights,
        cores_per_table=[len(table.p) for table in tables],
        num_embeddings=[table.rows for table in tables],
        feature_table_map=features,
        pooling_mode=pooling_mode,
    )
    return call.to(device)


def more_rows_than_slots(table: Table, twice: int, once: int, device: str = "cpu") -> Call:
    """Bags of four lookups, of ids that have two and of ids that have one.

    Of tables with 128 columns 8,192 rows are buffered if there are few lookups; one for eight
    lookups is kept for rows that lookups share.
    """
    generator = torch.Generator().manual_seed(5)
    ids = torch.randperm(table.rows, generator=generator)[: twice + once]
    ids = torch.cat([ids, ids[:twice]])
    ids = ids[torch.randperm(ids.numel(), generator=generator)]
    bags = ids.numel() // 4
    return make_call(
        [table],
        batch_size=bags,
        lengths=[4] * bags,
        ids=ids[: 4 * bags].tolist(),
        device=device,
    )
