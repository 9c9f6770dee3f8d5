"""Saves and restores model, optimizer and random state with torch.distributed.checkpoint."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torchrec.optim.keyed import KeyedOptimizer, KeyedOptimizerWrapper

from torchrec_flowtt.config import CheckpointError, RunFolderError
from torchrec_flowtt.train.checkpoint_files import (
    JobRecord,
    begin_write,
    finish_write,
    latest_checkpoint,
)
from torchrec_flowtt.train.model import ShardedModel
from torchrec_flowtt.train.processes import Processes
from torchrec_flowtt.train.run_folder import LATEST_FILE

_ADVICE = "resume with the configuration and the number of processes it was made with"
# Bytes; a file system with less has no room for another file of a checkpoint.
SPACE_LEFT = 1 << 16
MODEL, OPTIMIZER, RANDOM = "model", "optimizer", "random"


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int, processes: Processes) -> None:
        """``folder`` exists on every rank; the newest ``keep`` checkpoints stay in it."""
        self._folder = folder
        self._keep = keep
        self._processes = processes

    def save(self, sharded: ShardedModel, record: JobRecord) -> Path:
        """Writes a checkpoint on all ranks together and points ``latest`` at it.

        Raises:
            RunFolderError: it cannot be written; the previous checkpoint stays in force.
        """
        name = f"step-{record.progress.global_step:08d}"
        temporary = self._processes.from_first(lambda: self._guarded(begin_write, name))
        state = _state(sharded)
        state[f"{RANDOM}/cpu/{self._processes.rank}"] = torch.get_rng_state()
        if self._processes.device.type == "cuda":
            state[f"{RANDOM}/cuda/{self._processes.rank}"] = torch.cuda.get_rng_state()
        try:
            save(
                state,
                storage_writer=FileSystemWriter(temporary),
                process_group=self._processes.control,
            )
        except CheckpointException as error:
            raise RunFolderError(
                f"checkpoint {self._folder / name} cannot be written"
                f" ({_reason(error, self._folder)}); {self._still_there()}"
            ) from None
        self._processes.from_first(lambda: self._guarded(finish_write, name, record, self._keep))
        return self._folder / name

    def _guarded(self, action: Any, name: str, *arguments: Any) -> Any:
        try:
            return action(self._folder, name, *arguments)
        except OSError as error:
            raise RunFolderError(
                f"checkpoint {self._folder / name} cannot be written ({error.strerror});"
                f" {self._still_there()}"
            ) from None

    def _still_there(self) -> str:
        if (self._folder / LATEST_FILE).exists():
            return "the previous one is still in force"
        return "there is no earlier one"

    def load(self, sharded: ShardedModel, global_step: int) -> None:
        """Loads the latest checkpoint into the model, the optimizer and the random generators.

        Args:
            sharded: the model, freshly built.
            global_step: optimizer steps that the checkpoint has behind it.

        Raises:
            CheckpointError: it is of another model, or cannot be read.
        """
        checkpoint = latest_checkpoint(self._folder)
        for _, optimizer in sharded.optimizer.optimizers:
            if isinstance(optimizer, KeyedOptimizerWrapper):
                _create_state(optimizer)
        state = _state(sharded)
        reader = FileSystemReader(checkpoint)
        try:
            metadata = reader.read_metadata()
        except Exception as error:
            raise CheckpointError(
                f"checkpoint {checkpoint} is damaged: {type(error).__name__}: {error}"
            ) from None
        self._processes.together(lambda: _check_shapes(checkpoint, state, metadata))
        self._check_nothing_is_left(checkpoint, state, metadata)
        rank = self._processes.rank
        random = {f"{RANDOM}/cpu/{rank}": torch.get_rng_state()}
        if self._processes.device.type == "cuda":
            random[f"{RANDOM}/cuda/{rank}"] = torch.cuda.get_rng_state()
        # A run that goes on with more processes, or on another device, has no state for some.
        random = {k: v for k, v in random.items() if k in metadata.state_dict_metadata}
        state.update(random)
        try:
            load(state, storage_reader=reader, process_group=self._processes.control)
        except CheckpointException as error:
            raise CheckpointError(
                f"checkpoint {checkpoint} cannot be loaded ({_reason(error)})"
            ) from None
        _load_state(sharded, state)
        if f"{RANDOM}/cpu/{rank}" in random:
            torch.set_rng_state(state[f"{RANDOM}/cpu/{rank}"])
        if f"{RANDOM}/cuda/{rank}" in random:
            torch.cuda.set_rng_state(state[f"{RANDOM}/cuda/{rank}"])
        # FBGEMM's own step counter, on which Adam's bias correction depends, is in no state dict.
        sharded.optimizer.set_optimizer_step(global_step)

    def _check_nothing_is_left(
        self, checkpoint: Path, state: dict[str, Any], metadata: Metadata
    ) -> None:
        """A rank has optimizer state for its own tables only, so all their keys are compared."""
        keys: list[set[str]] = [set()] * self._processes.world_size
        dist.all_gather_object(keys, set(state), group=self._processes.control)
        for key in metadata.state_dict_metadata:
            if not key.startswith(f"{RANDOM}/") and not any(key in mine for mine in keys):
                raise CheckpointError(
                    f"checkpoint {checkpoint} holds {key}, which this model lacks; {_ADVICE}"
                )


def _reason(error: CheckpointException, written_to: Path | None = None) -> str:
    """The first rank's failure; the exception itself prints every rank's traceback."""
    for rank, failure in sorted(error.failures.items()):
        cause = failure[0]
        text = getattr(cause, "strerror", None) or _first_line(cause)
        # torch's own writer does not say why it failed.
        if written_to is not None and getattr(cause, "errno", None) is None:
            if shutil.disk_usage(written_to).free < SPACE_LEFT:
                text = os.strerror(errno.ENOSPC)
        return f"rank {rank}: {text}"
    return "unknown reason"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _state(sharded: ShardedModel) -> dict[str, Any]:
    """Model and optimizer state as one flat dictionary of tensors, which DCP stores by key."""
    flat: dict[str, Any] = {
        f"{MODEL}/{name}": value for name, value in sharded.model.state_dict().items()
    }
    for parameter, entries in sharded.optimizer.state_dict()["state"].items():
        for name, value in entries.items():
            flat[f"{OPTIMIZER}/{parameter}/{name}"] = value
    return flat


def _load_state(sharded: ShardedModel, flat: dict[str, Any]) -> None:
    sharded.model.load_state_dict(
        {k.removeprefix(f"{MODEL}/"): v for k, v in flat.items() if k.startswith(f"{MODEL}/")}
    )
    state = sharded.optimizer.state_dict()["state"]
    for parameter, entries in state.items():
        for name in entries:
            entries[name] = flat[f"{OPTIMIZER}/{parameter}/{name}"]
    sharded.optimizer.load_state_dict({"state": state})


def _create_state(optimizer: KeyedOptimizer) -> None:
    """Makes a lazy optimizer create its state, without changing any parameter.

    torch's optimizers create state in their first step. That step is taken with zero gradients, and
    what it does to the parameters is overwritten by the load that follows.
    """
    optimizer.init_state()
    optimizer.zero_grad()


def _check_shapes(checkpoint: Path, state: dict[str, Any], metadata: Metadata) -> None:
    stored = metadata.state_dict_metadata
    for key, value in state.items():
        if key not in stored:
            raise CheckpointError(f"checkpoint {checkpoint} lacks {key}; {_ADVICE}")
        entry = stored[key]
        if isinstance(entry, TensorStorageMetadata) and hasattr(value, "size"):
            if tuple(entry.size) != tuple(value.size()):
                raise CheckpointError(
                    f"checkpoint {checkpoint}: {key} has shape {list(entry.size)}, the model"
                    f" needs {list(value.size())}"
                )
