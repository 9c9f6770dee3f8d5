"""The planner's report, with the true bytes of TT tables."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingPlan

from torchrec_flowtt.distributed.compat import stats_lines, with_tensor
from torchrec_flowtt.distributed.table_parameters import tt_spec_of
from torchrec_flowtt.planner.placement import PlacementRow, placement_rows, table_shape
from torchrec_flowtt.planner.shadow_estimators import shadow_option

logger = logging.getLogger(__name__)

_HEADERS = (
    "Table",
    "Kernel",
    "TT-ranks",
    "Sharding",
    "Placed on",
    "Bytes",
    "Uncompressed",
    "Compression",
)


def placement_table(rows: Sequence[PlacementRow]) -> list[str]:
    """Rows of a plan as aligned lines of text, a header and a rule first."""
    cells = [_HEADERS, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEADERS))]
    left = (0, 1, 2, 3, 4)
    lines = [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def _cells(row: PlacementRow) -> tuple[str, ...]:
    name = f"{row.module}.{row.table}" if row.module else row.table
    return (
        name,
        row.kernel,
        ",".join(map(str, row.tt_ranks)) or "-",
        row.sharding_type,
        _ranks(row.ranks),
        f"{row.num_bytes:,}",
        f"{row.uncompressed_bytes:,}",
        f"{row.compression_ratio:,.1f}x",
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks)) or "-"


class FlowTTEmbeddingStats(EmbeddingStats):
    """TorchRec's report with the true bytes of TT tables, and a line for every table.

    TorchRec counts N x D bytes for a TT table; here its weights count as the TT-cores they are.
    Below TorchRec's report comes a table of kernel, TT-ranks, sharding, ranks placed on, bytes and
    compression ratio.
    """

    def log(self, sharding_plan: ShardingPlan, *args: Any, best_plan: Any, **kwargs: Any) -> None:
        """Log the report; arguments are those of ``EmbeddingStats.log``."""
        shadows = []
        self._originals: dict[int, ShardingOption] = {}
        for option in best_plan:
            spec = tt_spec_of(option.tensor)
            shown = option
            if spec is not None:
                shown = shadow_option(option, spec)
                shown.compute_kernel = option.compute_kernel
                self._originals[id(shown)] = option
            shadows.append(shown)
        super().log(sharding_plan, *args, best_plan=shadows, **kwargs)
        shapes = {(o.path, o.name): table_shape(o.tensor) for o in best_plan}
        if not sharding_plan.plan or not any(s.tt_spec for s in shapes.values()):
            return
        lines = ["Tables:", *placement_table(placement_rows(sharding_plan, shapes))]
        stats_lines(self).extend(lines)
        for line in lines:
            logger.info(line)

    def _log_sharding_plan(self, best_plan: Any, *args: Any, **kwargs: Any) -> Any:
        # The list of tables shows the rows of the table (hash size), not those of the shadow.
        shown = []
        for option in best_plan:
            original = self._originals.get(id(option))
            if original is not None:
                option = _copy_with_tensor(option, original)
            shown.append(option)
        return super()._log_sharding_plan(shown, *args, **kwargs)


def _copy_with_tensor(option: ShardingOption, original: ShardingOption) -> ShardingOption:
    with_tensor(option, original.tensor)
    return option
