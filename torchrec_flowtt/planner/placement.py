"""A sharding plan as rows of data: which table is where, how, and with how many bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ShardingPlan

from torchrec_flowtt.distributed.table_parameters import tt_spec_of
from torchrec_flowtt.shapes import TTSpec


@dataclass(frozen=True)
class TableShape:
    """What a planner knows of a table besides its placement.

    Attributes:
        num_embeddings: N.
        embedding_dim: D.
        dtype: dtype of weight or cores.
        tt_spec: TT shape, ``None`` for an uncompressed table.
    """

    num_embeddings: int
    embedding_dim: int
    dtype: torch.dtype
    tt_spec: TTSpec | None

    @property
    def uncompressed_bytes(self) -> int:
        """Bytes of the N x D table."""
        return self.num_embeddings * self.embedding_dim * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight, or of the TT-cores."""
        if self.tt_spec is None:
            return self.uncompressed_bytes
        return self.tt_spec.num_bytes(self.dtype)


@dataclass(frozen=True)
class PlacementRow:
    """One table of a sharding plan.

    Attributes:
        module: path of the collection in the model.
        table: name of the table.
        kernel: ``"flowtt"`` for a TT table, else TorchRec's compute kernel.
        tt_ranks: inner TT-ranks, empty for an uncompressed table.
        sharding_type: TorchRec's sharding type.
        ranks: ranks that hold a shard, or every rank if data-parallel.
        num_embeddings: N.
        embedding_dim: D.
        num_bytes: bytes of the weight or of the TT-cores; of one copy if data-parallel, without
            optimizer state.
        uncompressed_bytes: bytes that N x D would take.
    """

    module: str
    table: str
    kernel: str
    tt_ranks: tuple[int, ...]
    sharding_type: str
    ranks: tuple[int, ...]
    num_embeddings: int
    embedding_dim: int
    num_bytes: int
    uncompressed_bytes: int

    @property
    def compression_ratio(self) -> float:
        """Bytes of the uncompressed table over bytes held; 1 for an uncompressed table."""
        return self.uncompressed_bytes / self.num_bytes


def table_shape(parameter: torch.Tensor) -> TableShape:
    """The shape of the table that a shardable parameter stands for."""
    return TableShape(
        num_embeddings=parameter.shape[0],
        embedding_dim=parameter.shape[1],
        dtype=parameter.dtype,
        tt_spec=tt_spec_of(parameter),
    )


def sharded_modules(
    model: nn.Module, sharders: Sequence[Any], path: str = ""
) -> Iterator[tuple[str, nn.Module, Any]]:
    """Every module of `model` that one of `sharders` shards, with its path and the sharder."""
    for sharder in reversed(sharders):  # TorchRec uses the last that fits.
        if type(model) is sharder.module_type:
            yield path, model, sharder
            return
    for name, child in model.named_children():
        yield from sharded_modules(child, sharders, f"{path}.{name}" if path else name)


def table_shapes(model: nn.Module, sharders: Sequence[Any]) -> dict[tuple[str, str], TableShape]:
    """Shapes of all shardable tables, by module path and table name."""
    return {
        (path, table): table_shape(parameter)
        for path, module, sharder in sharded_modules(model, sharders)
        for table, parameter in sharder.shardable_parameters(module).items()
        if parameter.dim() == 2
    }


def placement_rows(
    plan: ShardingPlan, shapes: dict[tuple[str, str], TableShape]
) -> list[PlacementRow]:
    """The rows of a plan, in its order.

    Args:
        plan: a plan.
        shapes: shapes of its tables, from :func:`table_shapes`.

    Raises:
        KeyError: if the plan has a table without a shape.
    """
    rows = []
    for module, tables in plan.plan.items():
        for table, sharding in tables.items():
            if (module, table) not in shapes:
                raise KeyError(f"the plan has table {table!r} of module {module!r}, the model not")
            shape = shapes[module, table]
            rows.append(
                PlacementRow(
                    module=module,
                    table=table,
                    kernel=sharding.compute_kernel if shape.tt_spec is None else "flowtt",
                    tt_ranks=() if shape.tt_spec is None else shape.tt_spec.tt_ranks,
                    sharding_type=sharding.sharding_type,
                    ranks=tuple(sorted(set(sharding.ranks or ()))),
                    num_embeddings=shape.num_embeddings,
                    embedding_dim=shape.embedding_dim,
                    num_bytes=shape.num_bytes,
                    uncompressed_bytes=shape.uncompressed_bytes,
                )
            )
    return rows
