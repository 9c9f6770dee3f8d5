"""The processes of a run: who they are, how they agree, and how one of them speaks for all."""

from __future__ import annotations

import datetime
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from torchrec_flowtt.config import ConfigError, JobError

T = TypeVar("T")

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)


def launched_world() -> tuple[int, int, int]:
    """Rank, world size and local rank as torchrun set them; (0, 1, 0) without torchrun."""
    return (
        int(os.environ.get("RANK", "0")),
        int(os.environ.get("WORLD_SIZE", "1")),
        int(os.environ.get("LOCAL_RANK", "0")),
    )


def choose_device(name: str, local_rank: int, local_world_size: int) -> torch.device:
    """``auto``, ``cpu`` or ``cuda`` to this process's device.

    Raises:
        ConfigError: CUDA is wanted where there is none, or not enough GPUs for the processes.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device: cuda was asked for, but torch {torch.__version__} finds no GPU;"
            " set device=cpu or device=auto"
        )
    if local_world_size > torch.cuda.device_count():
        raise ConfigError(
            f"{local_world_size} processes on this machine need as many GPUs, there are"
            f" {torch.cuda.device_count()}; start fewer or set device=cpu"
        )
    return torch.device("cuda", local_rank)


@dataclass(frozen=True)
class Processes:
    """This process among the others.

    Attributes:
        rank, world_size: as in torch.distributed.
        local_world_size: processes on this machine.
        device: of this process.
        group: the process group of the training, gloo or nccl.
        control: a gloo group for flags and checkpoints, on the CPU whatever the device.
    """

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    group: dist.ProcessGroup
    control: dist.ProcessGroup

    @classmethod
    def start(cls, device: torch.device) -> Processes:
        """Joins the process group of torchrun, or makes one of a single process."""
        rank, world_size, _ = launched_world()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        if "TORCHELASTIC_RUN_ID" in os.environ:
            dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        else:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        group = dist.group.WORLD
        assert group is not None
        control = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return cls(rank, world_size, local, device, group, control)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that writes and prints."""
        return self.rank == 0

    def together(self, action: Callable[[], T]) -> T:
        """Runs ``action`` on every rank; if it fails on one, all raise the same error.

        ``action`` must not itself be in a collective that the failing rank leaves.

        Raises:
            JobError: the first one that a rank raised, by rank.
        """
        failure: JobError | None = None
        result: T | None = None
        try:
            result = action()
        except JobError as error:
            failure = error
        failures: list[JobError | None] = [None] * self.world_size
        dist.all_gather_object(failures, failure, group=self.control)
        for other in failures:
            if other is not None:
                raise other
        return result  # type: ignore[return-value]

    def from_first(self, action: Callable[[], T]) -> T:
        """Runs ``action`` on rank 0 alone and gives its result to all.

        Raises:
            JobError: what ``action`` raised, on every rank.
        """
        outcome: list[Any] = [None, None]
        unexpected: Exception | None = None
        if self.is_first:
            try:
                outcome[0] = action()
            except JobError as error:
                outcome[1] = error
            except Exception as error:  # the others must not wait for a result that never comes
                unexpected = error
                outcome[1] = JobError(f"rank 0 failed: {type(error).__name__}: {error}")
        dist.broadcast_object_list(outcome, src=0, group=self.control)
        if unexpected is not None:
            raise unexpected
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]  # type: ignore[no-any-return]

    def barrier(self) -> None:
        """Waits for all ranks."""
        dist.barrier(group=self.control)

    def stop(self) -> None:
        """Leaves the process groups."""
        dist.destroy_process_group()


def lost_another_process(error: BaseException) -> bool:
    """Whether an error says no more than that another rank has gone."""
    text = str(error)
    lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    of_group = isinstance(error, dist.DistError) or "gloo" in text
    return isinstance(error, RuntimeError) and of_group and any(sign in text for sign in lost)


def report_error(error: JobError) -> None:
    """Prints the one line of an error, on one of the processes only, whether or not they met.

    Under torchrun the processes draw lots through torchrun's own store, which exists before any
    process group does; if it cannot be reached, rank 0 speaks.
    """
    # torchrun ends the other ranks when the first one leaves; the one that speaks must finish.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if _speaks_for_all():
        print(f"flowtt: error: {error}", file=sys.stderr, flush=True)


def _speaks_for_all() -> bool:
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    rank, _, _ = launched_world()
    try:
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=datetime.timedelta(seconds=5),
        )
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return int(store.add(f"flowtt/error/{attempt}", 1)) == 1
    except (KeyError, ValueError, RuntimeError):
        return rank == 0
