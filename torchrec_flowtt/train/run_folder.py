"""The folder of a run: never another run's, and every file in it whole or absent."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

from torchrec_flowtt.config import JobConfig, RunFolderError

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.json"
TENSORBOARD_FOLDER = "tensorboard"


def check_run_folder(config: JobConfig, *, resume: bool) -> None:
    """Checks that the folder is free for a new run, or there to be resumed; writes nothing.

    Raises:
        RunFolderError: it holds another run, or there is nothing to resume.
    """
    folder = config.run_folder
    for place in (folder, config.checkpoint_folder):
        if not resume and _occupied(place):
            raise RunFolderError(
                f"run folder {place} already holds files; give --resume to continue that run, or"
                " another run_folder=... for a new one"
            )
    if resume and not folder.is_dir():
        raise RunFolderError(
            f"run folder {folder} does not exist, so there is nothing to resume; start without"
            " --resume"
        )


def claim_run_folder(config: JobConfig, *, resume: bool) -> None:
    """Makes the run folder, makes sure it can be written, and puts the configuration into it.

    Raises:
        RunFolderError: it cannot be written.
    """
    try:
        for place in (config.run_folder, config.checkpoint_folder):
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place):
                pass
        if not resume:
            write_atomically(
                config.run_folder / CONFIG_FILE,
                yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False),
            )
    except OSError as error:
        raise RunFolderError(
            f"run folder {config.run_folder} cannot be written: {error.strerror}; set"
            " run_folder=... to a folder that can"
        ) from None


def _occupied(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return False


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
        write_atomically(path, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written: {error.strerror}") from None
