"""Checkpoints as one flat state on this process, whatever they are stored as.

A folder with ``.metadata`` is one of torch.distributed.checkpoint (DCP), anything else a file of
``torch.save``. An entry's path is the sequence of keys that lead to it; joined by points it is the
name that DCP has for the entry.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

__all__ = ["State", "check_target", "joined", "read_state", "write_state"]

#: Entries by path.
State = dict[tuple[Any, ...], Any]

FILE_SUFFIXES = (".pt", ".pth")


def joined(path: tuple[Any, ...]) -> str:
    """An entry's name."""
    return ".".join(str(key) for key in path)


class _WeightsOnlyPlanner(DefaultLoadPlanner):
    """Loads what is no tensor without running code that the checkpoint names."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Puts an entry in its place."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read_state(source: Path) -> State:
    """Reads a checkpoint; the tensors of a file stay mapped from it.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no checkpoint, or needs more than ``weights_only=True`` to be read.
    """
    if (source / ".metadata").is_file():
        return _read_folder(source)
    if source.is_dir():
        raise ValueError(
            f"{source} is no checkpoint of torch.distributed.checkpoint: it has no .metadata"
        )
    try:
        # The older format, which is no zip file, cannot be mapped.
        content = torch.load(
            source, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(source)
        )
    except OSError as error:
        raise OSError(f"{source} cannot be read: {error}") from None
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        reason = _first_line(error)
        raise ValueError(
            f"{source} cannot be read by torch.load with weights_only=True: {reason}"
        ) from None
    if not isinstance(content, dict):
        raise ValueError(f"{source} must hold a dictionary, got {type(content).__name__}")
    state: State = {}
    _flatten(content, (), state)
    return state


def _read_folder(source: Path) -> State:
    reader = FileSystemReader(source)
    try:
        metadata = reader.read_metadata()
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
        raise ValueError(f"{source / '.metadata'} cannot be read: {_first_line(error)}") from None
    flat: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in metadata.state_dict_metadata.items()
    }
    planner = _WeightsOnlyPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with _in_one_process():
            load(flat, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        raise ValueError(
            f"{source} cannot be read by torch.distributed.checkpoint with weights_only=True: "
            f"{_reason(error)}"
        ) from None
    paths = metadata.planner_data or {}
    return {_nested_path(key, paths): value for key, value in flat.items()}


@contextlib.contextmanager
def _in_one_process() -> Iterator[None]:
    """Without the warning that there is no process group, which ``no_dist`` does not stop."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _reason(error: CheckpointException) -> str:
    """The first line of what went wrong; the exception itself prints a traceback."""
    return _first_line(next(iter(error.failures.values()))[0])


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _nested_path(key: str, paths: dict[str, Any]) -> tuple[Any, ...]:
    """Where an entry was in the dictionary that was saved; entries of lists keep their name."""
    path = tuple(paths.get(key, (key,)))
    return path if all(isinstance(part, str) for part in path) else (key,)


def _flatten(content: dict[Any, Any], prefix: tuple[Any, ...], into: State) -> None:
    for key, value in content.items():
        if isinstance(value, dict) and value:
            _flatten(value, (*prefix, key), into)
        else:
            into[(*prefix, key)] = value


def check_target(target: Path) -> None:
    """Checks that a checkpoint can be written, before work is put into it.

    Raises:
        FileExistsError: something is there already.
        FileNotFoundError: the folder it belongs in is not there.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists already")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} is no folder")


def write_state(target: Path, state: State) -> None:
    """Writes a file if `target` ends in ``.pt`` or ``.pth``, else a folder; whole or not at all.

    Raises:
        OSError: it cannot be written, or something is there already.
    """
    check_target(target)
    content: dict[Any, Any] = {}
    for path, value in state.items():
        inner = content
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
        temporary = Path(folder) / target.name
        if target.suffix in FILE_SUFFIXES:
            torch.save(content, temporary)
        else:
            try:
                with _in_one_process():
                    save(content, storage_writer=FileSystemWriter(temporary), no_dist=True)
            except CheckpointException as error:
                raise OSError(f"{target} cannot be written: {_reason(error)}") from None
        os.rename(temporary, target)
