"""Random calls of the operators, for tests that compare with the reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.reference import NONE, SUM, Bags


@dataclasses.dataclass(frozen=True)
class Table:
    """Shapes of one table; by default it has every row the factors allow."""

    p: tuple[int, ...]
    q: tuple[int, ...]
    ranks: tuple[int, ...]
    num_embeddings: int | None = None

    @property
    def rows(self) -> int:
        """N."""
        return math.prod(self.p) if self.num_embeddings is None else self.num_embeddings

    def cores(self, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
        """Gaussian cores, scaled so that rows keep entries of about one."""
        ranks = (1, *self.ranks, 1)
        return [
            (
                torch.randn(
                    (self.p[k], ranks[k], self.q[k], ranks[k + 1]),
                    generator=generator,
                    dtype=torch.float64,
                )
                / math.sqrt(ranks[k])
            ).to(dtype)
            for k in range(len(self.p))
        ]


@dataclasses.dataclass
class Call:
    """Cores and bags of one call."""

    cores: list[Tensor]
    bags: Bags

    @property
    def columns(self) -> int:
        """Columns of the output."""
        dims = []
        first = 0
        for count in self.bags.cores_per_table:
            dims.append(math.prod(core.shape[2] for core in self.cores[first : first + count]))
            first += count
        if self.bags.pooling_mode == NONE:
            return dims[self.bags.feature_table_map[0]]
        return sum(dims[table] for table in self.bags.feature_table_map)

    @property
    def output_rows(self) -> int:
        """Rows of the output."""
        if self.bags.pooling_mode == NONE:
            return self.bags.indices.numel()
        return self.bags.batch_size


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 cores, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def random_call(
    tables: Sequence[Table],
    *,
    features: Sequence[int] | None = None,
    batch_size: int = 5,
    longest_bag: int = 4,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int64,
    offset_dtype: torch.dtype = torch.int64,
    weighted: bool = False,
    pooling_mode: int = SUM,
    hot_share: float = 0.3,
    seed: int = 0,
) -> Call:
    """Bags of random length (0 included); a share of the lookups goes to one row per table."""
    generator = torch.Generator().manual_seed(seed)
    features = list(range(len(tables))) if features is None else list(features)
    lengths = torch.randint(0, longest_bag + 1, (len(features) * batch_size,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    parts = []
    for f, table in enumerate(features):
        count = int(lengths[f * batch_size : (f + 1) * batch_size].sum())
        rows = tables[table].rows
        ids = (torch.rand(count, generator=generator, dtype=torch.float64) * rows).long()
        ids = ids.clamp(max=rows - 1)
        ids[torch.rand(count, generator=generator) < hot_share] = rows - 1
        parts.append(ids)
    indices = torch.cat(parts)
    weights = None
    if weighted:
        weights = torch.randn(indices.numel(), generator=generator, dtype=torch.float64)
        weights = weights.to(accumulation_dtype(dtype))
    bags = Bags(
        indices=indices.to(index_dtype),
        offsets=offsets.to(offset_dtype),
        per_sample_weights=weights,
        cores_per_table=[len(table.p) for table in tables],
        num_embeddings=[table.rows for table in tables],
        feature_table_map=features,
        pooling_mode=pooling_mode,
    )
    return Call([core for table in tables for core in table.cores(dtype, generator)], bags)


def random_grad(call: Call, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """A random grad_output."""
    generator = torch.Generator().manual_seed(seed)
    shape = (call.output_rows, call.columns)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
