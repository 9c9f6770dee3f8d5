"""The tables of the model, each with its kernel and shape, checked before anything is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec_flowtt.config import ConfigError, JobConfig, TableRule, select_rules
from torchrec_flowtt.shapes import TTSpec

BYTES_PER_WEIGHT = 4


@dataclass(frozen=True)
class Table:
    """One table of the model; its feature has the same name.

    Attributes:
        name: of table and feature.
        num_embeddings: N, rows.
        embedding_dim: D, columns.
        rule: the configuration that holds for it.
        spec: the TT shape, or None for a table that FBGEMM stores uncompressed.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    rule: TableRule
    spec: TTSpec | None

    @property
    def kernel(self) -> str:
        """``flowtt`` or ``fbgemm``."""
        return self.rule.kernel

    @property
    def uncompressed_bytes(self) -> int:
        """Bytes of the N x D table in fp32."""
        return self.num_embeddings * self.embedding_dim * BYTES_PER_WEIGHT

    @property
    def bytes(self) -> int:
        """Bytes of what is stored in fp32: the cores, or the table itself."""
        if self.spec is None:
            return self.uncompressed_bytes
        return self.spec.num_parameters * BYTES_PER_WEIGHT

    def shape(self) -> dict[str, Any]:
        """What a checkpoint must agree with, as JSON."""
        shape: dict[str, Any] = {
            "num_embeddings": self.num_embeddings,
            "embedding_dim": self.embedding_dim,
            "kernel": self.kernel,
        }
        if self.spec is not None:
            shape["p_shapes"] = list(self.spec.p_shapes)
            shape["q_shapes"] = list(self.spec.q_shapes)
            shape["tt_ranks"] = list(self.spec.tt_ranks)
        return shape


def table_warnings(tables: Sequence[Table]) -> list[str]:
    """One line for every TT table whose compression is of no use, or wastes parameters."""
    warnings = []
    for table in tables:
        if table.spec is None:
            continue
        useful = table.spec.max_useful_ranks
        if table.bytes >= table.uncompressed_bytes:
            warnings.append(
                f"table {table.name!r}: its TT cores take {table.bytes:,} bytes, uncompressed it"
                f" takes {table.uncompressed_bytes:,}; lower its tt_ranks or use kernel fbgemm"
            )
        elif any(rank > most for rank, most in zip(table.spec.tt_ranks, useful, strict=True)):
            warnings.append(
                f"table {table.name!r}: tt_ranks {list(table.spec.tt_ranks)} are more than"
                f" {list(useful)}, which already represent any table of its shape"
            )
    return warnings


def resolve_tables(config: JobConfig, rows: Mapping[str, int]) -> tuple[Table, ...]:
    """Applies the table rules to the tables of the data.

    Args:
        config: the configuration.
        rows: name and number of rows of every table.

    Raises:
        ConfigError: a rule matches no table, or a TT shape is impossible for a table.
    """
    dim = config.model.embedding_dim
    tables = []
    for name, rule in select_rules(config.tables, list(rows)).items():
        spec = _spec(name, rows[name], dim, rule) if rule.kernel == "flowtt" else None
        tables.append(Table(name, rows[name], dim, rule, spec))
    return tuple(tables)


def _spec(name: str, rows: int, dim: int, rule: TableRule) -> TTSpec:
    try:
        return TTSpec.suggest(
            rows,
            dim,
            tt_ranks=rule.resolved_tt_ranks,
            num_cores=rule.resolved_num_cores,
            p_shapes=rule.p_shapes,
            q_shapes=rule.q_shapes,
            max_bytes=rule.max_bytes,
            name=name,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"tables.{rule.name}: {error}") from None
