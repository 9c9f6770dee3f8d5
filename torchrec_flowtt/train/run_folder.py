"""The folder of a run: never another run's, and every file in it whole or absent."""

from __future__ import annotations

import fnmatch
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

from torchrec_flowtt.config import ConfigError, JobConfig, RunFolderError, load_config
from torchrec_flowtt.train.run_lock import LOCK_FILE, check_unlocked, lock_folders

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.json"
TENSORBOARD_FOLDER = "tensorboard"
CHECKPOINT_FOLDER = "checkpoints"
LATEST_FILE = "latest"
TEMPORARY_PREFIX = ".writing-"
EVENTS = "events.out.tfevents.*"


def check_run_folder(config: JobConfig, *, resume: bool) -> None:
    """Checks that the folder is free for a new run, or there to be resumed; writes nothing.

    What a run left that never wrote a checkpoint is no obstacle to a new one.

    Raises:
        RunFolderError: it is in use, it holds another run, or there is nothing to resume.
    """
    folder = config.run_folder
    check_unlocked(config)
    if not resume and not _only_a_false_start(folder):
        for place in (folder, config.checkpoint_folder):
            if _occupied(place):
                raise RunFolderError(
                    f"run folder {place} already holds files; give --resume to continue that run,"
                    " or another run_folder=... for a new one"
                )
    elif not resume and _occupied(config.checkpoint_folder):
        raise RunFolderError(
            f"checkpoint folder {config.checkpoint_folder} already holds files; give another"
            " checkpoint.folder=... for a new run"
        )
    if resume and not folder.is_dir():
        raise RunFolderError(
            f"run folder {folder} does not exist, so there is nothing to resume; start without"
            " --resume"
        )


def claim_run_folder(config: JobConfig, *, resume: bool) -> None:
    """Makes the run folder, locks it, makes sure it can be written, and stores the configuration.

    The lock is held until this process ends.

    Raises:
        RunFolderError: it cannot be written, or another run was faster.
    """
    try:
        for place in (config.run_folder, config.checkpoint_folder):
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place):
                pass
        check_run_folder(config, resume=resume)
        lock_folders(config)
        if not resume:
            for events in (config.run_folder / TENSORBOARD_FOLDER).glob(EVENTS):
                events.unlink()
            write_atomically(config.run_folder / CONFIG_FILE, config_text(config))
    except OSError as error:
        raise RunFolderError(
            f"run folder {config.run_folder} cannot be written: {error.strerror}; set"
            " run_folder=... to a folder that can"
        ) from None


def config_text(config: JobConfig) -> str:
    """The content of ``config.yaml``: every value, defaults too."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _occupied(folder: Path) -> bool:
    try:
        names = [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False
    return any(name != LOCK_FILE and not name.startswith(TEMPORARY_PREFIX) for name in names)


def _only_a_false_start(folder: Path) -> bool:
    """Whether a folder holds what a run leaves that ends before its first checkpoint, or less."""
    known = {LOCK_FILE, CONFIG_FILE, TENSORBOARD_FOLDER, CHECKPOINT_FOLDER}
    try:
        if any(path.name not in known for path in folder.iterdir()):
            return False
        for path in (folder / CHECKPOINT_FOLDER).glob("*"):
            if path.name != LOCK_FILE and not path.name.startswith(TEMPORARY_PREFIX):
                return False
        for path in (folder / TENSORBOARD_FOLDER).glob("*"):
            if not fnmatch.fnmatchcase(path.name, EVENTS):
                return False
        return _is_own_config(folder / CONFIG_FILE)
    except OSError:
        return False


def _is_own_config(path: Path) -> bool:
    """Whether a run wrote the file, not a person, and keeps no checkpoints elsewhere."""
    if not path.exists():
        return True
    try:
        config = load_config(path)
        own = path.read_text(encoding="utf-8") == config_text(config)
    except (ConfigError, OSError):
        return False
    return own and not (config.checkpoint_folder / LATEST_FILE).exists()


def write_atomically(path: Path, text: str) -> None:
    """Writes a file under a temporary name and renames it, so that no reader sees half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON atomically.

    Raises:
        RunFolderError: the file cannot be written.
    """
    try:
        write_atomically(path, json.dumps(content, indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror}") from None
