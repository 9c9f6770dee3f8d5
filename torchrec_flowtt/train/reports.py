"""What the job shows and writes: plan, memory, progress, TensorBoard and metrics.json."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate
from torchrec.distributed.types import ShardingPlan
from tqdm import tqdm

from torchrec_flowtt.train.evaluation import Scores
from torchrec_flowtt.train.progress import Progress
from torchrec_flowtt.train.run_folder import TENSORBOARD_FOLDER
from torchrec_flowtt.train.tables import Table

SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class Placement:
    """One row of the plan: a table, how it is stored and where.

    Attributes:
        table: name.
        kernel: ``flowtt`` or ``fbgemm``.
        rows: N.
        tt_ranks: inner ranks as text, empty for fbgemm.
        sharding: TorchRec's sharding type.
        ranks: the ranks that hold a part, or all of it if data-parallel.
        bytes: of the weights, once.
        uncompressed_bytes: of the N x D table.
    """

    table: str
    kernel: str
    rows: int
    tt_ranks: str
    sharding: str
    ranks: list[int]
    bytes: int
    uncompressed_bytes: int


def placements(tables: Sequence[Table], plan: ShardingPlan) -> list[Placement]:
    """The plan as one row a table."""
    found: dict[str, Any] = {}
    for module_plan in plan.plan.values():
        found.update(module_plan)
    rows = []
    for table in tables:
        sharding = found[table.name]
        ranks = "" if table.spec is None else ", ".join(map(str, table.spec.tt_ranks))
        rows.append(
            Placement(
                table.name,
                table.kernel,
                table.num_embeddings,
                ranks,
                sharding.sharding_type,
                sorted(set(sharding.ranks or [])),
                table.bytes,
                table.uncompressed_bytes,
            )
        )
    return rows


def plan_table(rows: Sequence[Placement]) -> str:
    """The plan as text, with the total bytes stored and uncompressed in its last line."""
    header = ["table", "kernel", "rows", "TT ranks", "sharding", "on rank", "bytes"]
    header += ["uncompressed", "ratio"]
    lines = [
        [
            row.table,
            row.kernel,
            f"{row.rows:,}",
            row.tt_ranks,
            row.sharding,
            ", ".join(map(str, row.ranks)),
            f"{row.bytes:,}",
            f"{row.uncompressed_bytes:,}",
            f"{row.uncompressed_bytes / row.bytes:.1f}",
        ]
        for row in rows
    ]
    stored = sum(row.bytes for row in rows)
    full = sum(row.uncompressed_bytes for row in rows)
    lines.append(["total", "", "", "", "", "", f"{stored:,}", f"{full:,}", f"{full / stored:.1f}"])
    alignment = ["left", "left", "right", "left", "left", "left", "right", "right", "right"]
    return tabulate(lines, header, tablefmt="simple", colalign=alignment, disable_numparse=True)


class ProgressDisplay:
    """Rank 0's progress bar and TensorBoard writer; does nothing on the other ranks."""

    def __init__(
        self, folder: Path, *, total_examples: int, progress: Progress, enabled: bool
    ) -> None:
        """``total_examples`` counts the whole run, of which ``progress`` may have done a part."""
        self._enabled = enabled
        self._writer: Any = None
        # A terminal gets a moving bar, anything else a line now and then.
        self._lines = enabled and not sys.stderr.isatty()
        self._done, self._total, self._shown = progress.examples, total_examples, time.monotonic()
        self._epoch = self._loss = ""
        self._bar = tqdm(
            total=total_examples,
            initial=progress.examples,
            unit="ex",
            unit_scale=True,
            mininterval=0.2,
            disable=not enabled or self._lines,
            file=sys.stderr,
        )
        if enabled:
            from torch.utils.tensorboard import SummaryWriter  # slow to load; one rank needs it

            self._writer = SummaryWriter(
                str(folder / TENSORBOARD_FOLDER), purge_step=progress.global_step + 1
            )

    def say(self, text: str) -> None:
        """Prints a line to standard output without tearing the bar."""
        if self._enabled:
            self._bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def advance(self, examples: int) -> None:
        """Counts the examples of a step, over all ranks."""
        self._bar.update(examples)
        self._done += examples
        if self._lines and time.monotonic() - self._shown >= SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            share = self._done / self._total
            print(
                f"{self._epoch}: {self._done:,} of {self._total:,} examples"
                f" ({share:.0%}){self._loss}",
                file=sys.stderr,
                flush=True,
            )

    def epoch(self, number: int, total: int) -> None:
        """Names the epoch in the bar."""
        self._epoch = f"epoch {number}/{total}"
        self._bar.set_description(self._epoch, refresh=False)

    def loss(self, progress: Progress, loss: float) -> None:
        """Shows and logs a training loss."""
        if self._enabled:
            self._loss = f", loss {loss:.4f}"
            self._bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            self._writer.add_scalar("train/loss", loss, progress.global_step)
            self._writer.add_scalar(
                "train/examples_per_second", progress.examples_per_second, progress.global_step
            )

    def scores(self, split: str, scores: Scores, step: int) -> None:
        """Logs the scores of a split."""
        if self._enabled:
            self._writer.add_scalar(f"{split}/auc", scores.auc, step)
            self._writer.add_scalar(f"{split}/log_loss", scores.log_loss, step)

    def close(self) -> None:
        """Ends the bar and flushes TensorBoard."""
        self._bar.close()
        if self._writer is not None:
            self._writer.close()


def metrics_document(
    rows: Sequence[Placement], progress: Progress, world_size: int, test: Scores | None
) -> dict[str, Any]:
    """The content of ``metrics.json``; the ``test_*`` keys are there once the run is complete."""
    document: dict[str, Any] = {
        "complete": test is not None,
        "table_bytes": sum(row.bytes for row in rows),
        "uncompressed_table_bytes": sum(row.uncompressed_bytes for row in rows),
        "examples_per_second": progress.examples_per_second,
        "world_size": world_size,
        "tables": [asdict(row) for row in rows],
        "epochs": progress.epochs,
        "losses": progress.losses,
    }
    if test is not None:
        document["test_auc"] = test.auc
        document["test_log_loss"] = test.log_loss
        document["test_examples"] = test.examples
    return document
