"""One process of a training run, from the checked configuration to its last report."""

from __future__ import annotations

import logging
import os
import time
import warnings

import torch

from torchrec_flowtt.config import Interrupted
from torchrec_flowtt.data.batches import ExampleStore
from torchrec_flowtt.train.checkpoint import CheckpointStore
from torchrec_flowtt.train.evaluation import Scores
from torchrec_flowtt.train.interruption import StopRequest
from torchrec_flowtt.train.model import ShardedModel, build_sharded_model
from torchrec_flowtt.train.preflight import Prepared
from torchrec_flowtt.train.processes import Processes, choose_device, launched_world
from torchrec_flowtt.train.reports import (
    Placement,
    ProgressDisplay,
    metrics_document,
    placements,
    plan_table,
)
from torchrec_flowtt.train.run_folder import METRICS_FILE, write_json
from torchrec_flowtt.train.tables import table_warnings
from torchrec_flowtt.train.trainer import Trainer


def run_job(prepared: Prepared, *, resume: bool) -> None:
    """Trains, evaluates and reports; called by every process of the run.

    Raises:
        JobError: on every rank, with the same message.
        Interrupted: after SIGINT or SIGTERM, when the checkpoint is written.
    """
    config = prepared.config
    _quieten()
    _, _, local_rank = launched_world()
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = choose_device(config.device, local_rank, local_world_size)
    processes = Processes.start(device)
    stop = StopRequest(processes.control)
    try:
        store = ExampleStore(prepared.dataset)
        sharded = build_sharded_model(
            config, prepared.tables, store.num_dense, processes, prepared.sharding
        )
        checkpoints = CheckpointStore(config.checkpoint_folder, config.checkpoint.keep, processes)
        if resume:
            checkpoints.load(sharded, prepared.progress.global_step)
        _train(prepared, sharded, processes, store, checkpoints, stop)
        processes.barrier()
    finally:
        stop.close()
    processes.stop()


def _train(
    prepared: Prepared,
    sharded: ShardedModel,
    processes: Processes,
    store: ExampleStore,
    checkpoints: CheckpointStore,
    stop: StopRequest,
) -> None:
    config = prepared.config
    rows = placements(prepared.tables, sharded.plan)
    steps = len(prepared.dataset.splits["train"]) // config.train.batch_size
    display = ProgressDisplay(
        config.run_folder,
        total_examples=steps * config.train.batch_size * config.train.epochs,
        progress=prepared.progress,
        enabled=processes.is_first,
    )
    trainer = Trainer(prepared, sharded, processes, store, checkpoints, display, stop)
    started = time.perf_counter()
    try:
        display.say(_opening(prepared, processes, resumed=prepared.progress.global_step))
        for warning in table_warnings(prepared.tables):
            display.say(f"warning: {warning}")
        display.say(plan_table(rows))
        test = trainer.run()
    except Interrupted:
        _write_metrics(prepared, processes, rows, None)
        raise
    finally:
        display.close()
    _write_metrics(prepared, processes, rows, test)
    if processes.is_first:
        print(_closing(prepared, rows, test, time.perf_counter() - started), flush=True)


def _opening(prepared: Prepared, processes: Processes, resumed: int) -> str:
    splits = ", ".join(
        f"{len(examples):,} {name}" for name, examples in prepared.dataset.splits.items()
    )
    where = f" from step {resumed}" if resumed else ""
    return (
        f"training{where} on {processes.world_size} {processes.device.type} process(es):"
        f" {splits} examples"
    )


def _closing(prepared: Prepared, rows: list[Placement], test: Scores, seconds: float) -> str:
    stored = sum(row.bytes for row in rows)
    full = sum(row.uncompressed_bytes for row in rows)
    return (
        f"test AUC {test.auc:.4f}, log-loss {test.log_loss:.4f} over {test.examples:,} examples\n"
        f"tables {stored:,} bytes, uncompressed {full:,} bytes: {full / stored:.1f} times smaller\n"
        f"{prepared.progress.examples_per_second:,.0f} training examples/s, {seconds:.1f} s in all;"
        f" run folder {prepared.config.run_folder}"
    )


def _write_metrics(
    prepared: Prepared, processes: Processes, rows: list[Placement], test: Scores | None
) -> None:
    document = metrics_document(rows, prepared.progress, processes.world_size, test)
    path = prepared.config.run_folder / METRICS_FILE
    processes.from_first(lambda: write_json(path, document))


def _quieten() -> None:
    """Keeps TorchRec's and torch's routine warnings out of the progress display."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch|torchrec")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch|torchrec")
    for name in ("torchrec", "torch.fx", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger().setLevel(logging.ERROR)
    torch.set_warn_always(False)
