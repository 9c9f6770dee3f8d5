"""Everything that can be wrong with a run, checked before its processes meet."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_flowtt.config import ConfigError, JobConfig
from torchrec_flowtt.data import Dataset, build_dataset, prepare_data, read_interactions
from torchrec_flowtt.train.checkpoint_files import (
    check_same_run,
    deciding_settings,
    latest_checkpoint,
    read_job_record,
)
from torchrec_flowtt.train.checkpoint_sums import check_sums
from torchrec_flowtt.train.processes import choose_device
from torchrec_flowtt.train.progress import Progress
from torchrec_flowtt.train.run_folder import check_run_folder
from torchrec_flowtt.train.tables import Table, resolve_tables


@dataclass(frozen=True)
class Prepared:
    """A run that may start.

    Attributes:
        config: the configuration.
        dataset: all examples.
        tables: all tables.
        settings: what a checkpoint must agree with.
        progress: from the checkpoint, or the beginning.
        sharding: of every table in the checkpoint, which ``auto`` then follows; else empty.
    """

    config: JobConfig
    dataset: Dataset
    tables: tuple[Table, ...]
    settings: dict[str, object]
    progress: Progress
    sharding: dict[str, str]


def prepare(config: JobConfig, world_size: int, *, resume: bool, first: bool = True) -> Prepared:
    """Reads the data, resolves the tables and compares the checkpoint.

    Args:
        config: the configuration.
        world_size: processes of the run.
        resume: whether the run goes on from its last checkpoint.
        first: whether this process looks at the run folder. Only one must: what the first one
            writes there would look like another run's to a process that comes later.

    Raises:
        JobError: whatever is wrong; see the package's error classes.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "the training job logs to TensorBoard, which is not installed; run"
            " pip install 'torchrec-flowtt[train]'"
        )
    folder = prepare_data(config.data)
    dataset = build_dataset(read_interactions(folder, config.data.name), config.data)
    tables = resolve_tables(config, dataset.table_rows)
    _check_processes(config, world_size, len(tables), len(dataset.splits["train"]))
    _check_device(config, world_size, tables)
    if first:
        check_run_folder(config, resume=resume)
    settings = deciding_settings(config, len(dataset.labels))
    progress = Progress()
    sharding: dict[str, str] = {}
    if resume:
        checkpoint = latest_checkpoint(config.checkpoint_folder)
        if first:  # once is enough: the others' ranks wait in the rendezvous meanwhile
            check_sums(checkpoint)
        record = read_job_record(checkpoint)
        check_same_run(checkpoint, record, settings, tables)
        progress, sharding = record.progress, record.sharding
    return Prepared(config, dataset, tables, settings, progress, sharding)


def _check_processes(
    config: JobConfig, world_size: int, num_tables: int, training_examples: int
) -> None:
    if world_size > num_tables:
        raise ConfigError(
            f"{world_size} processes are more than the {num_tables} tables there are to share out;"
            f" start at most {num_tables}"
        )
    batch_size = config.train.batch_size
    if batch_size % world_size:
        raise ConfigError(
            f"train.batch_size {batch_size} is not a multiple of the {world_size} processes that"
            f" share it; take {batch_size // world_size * world_size or world_size}"
        )
    if batch_size > training_examples:
        raise ConfigError(
            f"train.batch_size {batch_size} is more than the {training_examples} training examples"
        )


def _check_device(config: JobConfig, world_size: int, tables: Sequence[Table]) -> None:
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    device = choose_device(config.device, 0, local_world_size)
    for table in tables if device.type == "cpu" else ():
        if table.rule.sharding == "row_wise":
            raise ConfigError(
                f"tables.{table.rule.name}.sharding: TorchRec shards row_wise on CUDA only, and"
                f" table {table.name!r} is to be on the CPU; use auto, table_wise, column_wise or"
                " data_parallel"
            )
    if device.type == "cpu" and config.optimizer.sparse.name == "adam":
        for table in tables:
            if table.kernel == "fbgemm" and table.rule.sharding != "data_parallel":
                raise ConfigError(
                    f"optimizer.sparse.name: FBGEMM has no Adam on the CPU, which table"
                    f" {table.name!r} would need; take another optimizer, or kernel flowtt or"
                    " sharding data_parallel for every table"
                )
