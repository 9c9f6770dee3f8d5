"""Table shapes and groups of tables that the GPU tests run over."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.gpu.calls import Call, Table, make_call


@dataclasses.dataclass(frozen=True)
class Tables:
    """Tables of one call and the table of each feature."""

    tables: tuple[Table, ...]
    feature_table_map: tuple[int, ...]

    def call(self, **options: Any) -> Call:
        """Of these tables and features; see make_call."""
        return make_call(self.tables, feature_table_map=self.feature_table_map, **options)


def one(
    p: tuple[int, ...], q: tuple[int, ...], ranks: tuple[int, ...], rows: int | None = None
) -> Tables:
    return Tables((Table(p, q, ranks, rows),), (0,))


_TWO = Table((7, 9), (4, 3), (5,), 60)
_THREE = Table((5, 6, 7), (2, 4, 4), (8, 3), 201)
_FOUR = Table((3, 2, 4, 5), (2, 1, 3, 2), (3, 6, 2))

TABLES: dict[str, Tables] = {
    "two cores": Tables((_TWO,), (0,)),
    "three cores": Tables((_THREE,), (0,)),
    "four cores": Tables((_FOUR,), (0,)),
    "rank 1": one((4, 5, 6), (3, 2, 2), (1, 1)),
    "one column": one((8, 8), (1, 1), (4,)),
    "one row": one((1, 1, 1), (2, 2, 2), (3, 3)),
    "prime sizes": one((11, 13, 17), (5, 7, 3), (11, 13), 2000),
    "dlrm": one((20, 22, 25), (4, 4, 4), (16, 16), 10_007),
    "levels wider than a block": one((3, 4, 5), (8, 8, 8), (32, 32)),
    "different tables": Tables((_TWO, _THREE, _FOUR), (0, 1, 2)),
    "features share tables": Tables((_TWO, _THREE, _FOUR), (1, 0, 1, 2, 0, 1)),
    "unused table": Tables((_TWO, _THREE), (1,)),
    # 114 KB of prefix products: shared memory above the 48 KB a kernel gets without asking.
    "large shared memory": one((2, 2, 2), (16, 16, 16), (512, 64)),
    # 327 KB: more than a block of any GPU has, so the prefixes go to global memory.
    "global scratch": one((2, 2, 2), (16, 8, 4), (1024, 512)),
    # More features and more cores than one launch takes.
    "many tables": Tables(
        tuple(Table((3, 4, 2), (2, 2, 2), (2, 3)) for _ in range(70)), (*range(70), 3)
    ),
}

SMALL = [name for name in TABLES if name not in ("large shared memory", "global scratch")]
