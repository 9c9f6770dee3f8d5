"""The checkpoint folder: names, the ``latest`` pointer, and what a checkpoint says of its run.

A checkpoint is a folder ``step-00000123`` with the files of torch.distributed.checkpoint and
``job.json`` and, last, ``SHA256SUMS``. It is written under a temporary name, renamed when whole,
and only then does ``latest`` name it, so a write that fails or is cut off leaves the previous
checkpoint in force.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrec_flowtt.config import CheckpointError, JobConfig
from torchrec_flowtt.train.checkpoint_sums import write_sums
from torchrec_flowtt.train.progress import Progress
from torchrec_flowtt.train.run_folder import LATEST_FILE, TEMPORARY_PREFIX, write_atomically
from torchrec_flowtt.train.tables import Table

JOB_FILE = "job.json"
DATA_PARALLEL = "data_parallel"
FORMAT = 1
CHECKPOINT_NAME = re.compile(r"step-\d{8,}")


@dataclass(frozen=True)
class JobRecord:
    """What ``job.json`` holds.

    Attributes:
        settings: the configuration values that decide the run's numbers.
        tables: every table's shape, see :meth:`Table.shape`.
        progress: the position of the run.
        sharding: TorchRec's sharding type of every table.
    """

    settings: dict[str, Any]
    tables: dict[str, dict[str, Any]]
    progress: Progress
    sharding: dict[str, str]

    def to_json(self) -> str:
        """Serialises the record."""
        content = {
            "format": FORMAT,
            "settings": self.settings,
            "tables": self.tables,
            "sharding": self.sharding,
            "progress": self.progress.to_json(),
        }
        return json.dumps(content, indent=2) + "\n"


def deciding_settings(config: JobConfig, examples: int) -> dict[str, Any]:
    """The settings that must not change between a checkpoint and its continuation, flat."""
    content = config.model_dump(mode="json")
    data = content["data"]
    for local in ("path", "cache_dir"):
        del data[local]
    flat: dict[str, Any] = {"seed": content["seed"], "examples in the data": examples}
    flat["train.batch_size"] = content["train"]["batch_size"]
    for section in ("data", "model", "optimizer"):
        _flatten(content[section], section, flat)
    return flat


def _flatten(content: dict[str, Any], prefix: str, into: dict[str, Any]) -> None:
    for key, value in content.items():
        if isinstance(value, dict):
            _flatten(value, f"{prefix}.{key}", into)
        else:
            into[f"{prefix}.{key}"] = value


def latest_checkpoint(folder: Path) -> Path:
    """The checkpoint that ``latest`` names.

    Raises:
        CheckpointError: there is none, or ``latest`` holds something else than a folder's name.
    """
    pointer = folder / LATEST_FILE
    try:
        name = pointer.read_text(encoding="utf-8").strip()
    except OSError:
        raise CheckpointError(
            f"no checkpoint in {folder} ({LATEST_FILE} is missing), so there is nothing to resume;"
            " start without --resume"
        ) from None
    except ValueError:
        name = ""
    if not CHECKPOINT_NAME.fullmatch(name):
        raise CheckpointError(
            f"{pointer} must hold the name of a step-* folder beside it, not {name!r}"
        )
    return folder / name


def read_job_record(checkpoint: Path) -> JobRecord:
    """Reads ``job.json``.

    Raises:
        CheckpointError: it is not what this version writes.
    """
    path = checkpoint / JOB_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"{path}: format {content['format']}, this version reads {FORMAT}"
            )
        progress = Progress.from_json(content["progress"])
        return JobRecord(content["settings"], content["tables"], progress, content["sharding"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}: {error})") from None


def check_same_run(
    checkpoint: Path, record: JobRecord, settings: dict[str, Any], tables: Sequence[Table]
) -> None:
    """Checks that a checkpoint belongs to the model and the settings of this configuration.

    Raises:
        CheckpointError: names the first table or setting that differs, with both values.
    """
    advice = "resume with the configuration it was made with, or start another run_folder"
    ours = {table.name: table.shape() for table in tables}
    for name in [*record.tables, *ours]:
        if name not in ours:
            raise CheckpointError(
                f"checkpoint {checkpoint} has a table {name!r} that this configuration lacks;"
                f" {advice}"
            )
        if name not in record.tables:
            raise CheckpointError(f"checkpoint {checkpoint} lacks the table {name!r}; {advice}")
        theirs = record.tables[name]
        for key in [*theirs, *ours[name]]:
            if theirs.get(key) != ours[name].get(key):
                raise CheckpointError(
                    f"checkpoint {checkpoint}: table {name!r} has {key} {theirs.get(key)}, the"
                    f" configuration says {ours[name].get(key)}; {advice}"
                )
    for table in tables:
        recorded, wanted = record.sharding.get(table.name), table.rule.sharding
        # Optimizer state of a replicated table has other names and shapes than a fused one's.
        if wanted != "auto" and (recorded == DATA_PARALLEL) != (wanted == DATA_PARALLEL):
            raise CheckpointError(
                f"checkpoint {checkpoint}: table {table.name!r} was sharded {recorded}, the"
                f" configuration says {wanted}; leave its sharding at auto or {recorded}"
            )
    for key in [*record.settings, *settings]:
        if record.settings.get(key) != settings.get(key):
            raise CheckpointError(
                f"checkpoint {checkpoint} was made with {key} = {record.settings.get(key)}, the"
                f" configuration says {settings.get(key)}; {advice}"
            )


def begin_write(folder: Path, name: str) -> Path:
    """Makes the temporary folder of a checkpoint, clearing away what a cut-off write left."""
    for stale in folder.glob(f"{TEMPORARY_PREFIX}*"):
        shutil.rmtree(stale)
    temporary = folder / f"{TEMPORARY_PREFIX}{name}"
    temporary.mkdir()
    return temporary


def finish_write(folder: Path, name: str, record: JobRecord, keep: int) -> None:
    """Puts a whole checkpoint in place, points ``latest`` at it, and drops the oldest."""
    temporary = folder / f"{TEMPORARY_PREFIX}{name}"
    write_atomically(temporary / JOB_FILE, record.to_json())
    write_sums(temporary)
    final = folder / name
    if final.exists():  # whole, but not yet pointed at, from a run that was killed just then
        shutil.rmtree(final)
    temporary.rename(final)
    _flush_folder(folder)
    write_atomically(folder / LATEST_FILE, f"{name}\n")
    _flush_folder(folder)
    older = sorted(path for path in folder.glob("step-*") if path.name < name)
    for path in older[: max(0, len(older) + 1 - keep)]:
        shutil.rmtree(path)


def _flush_folder(folder: Path) -> None:
    """Makes renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
