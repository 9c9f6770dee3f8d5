"""Checks of asynchronous checkpoints, which are written while training goes on."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.distributed.checkpoint_jobs import (
    OPTIMIZERS,
    Job,
    assert_same,
    shared_folder,
    tables,
    weights,
)


class HeldWriter(dcp.FileSystemWriter):
    """Writes nothing before it is let go."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.may_write = threading.Event()

    def write_data(self, plan: Any, planner: Any) -> Any:
        assert self.may_write.wait(timeout=30)
        return super().write_data(plan, planner)


def asynchronous_save(optimizer: str, **kwargs: Any):
    """What is written is the state at the call, though fused steps change cores in place."""

    def check() -> None:
        fbgemm = "dp" if optimizer == "adam" else "tw0"
        group = dist.new_group(backend="gloo")  # its collectives run beside those of training
        places = ("tw0", "tw1", "dp")
        job = Job(tables(*places, fbgemm=fbgemm), OPTIMIZERS[optimizer], **kwargs)
        job.train(range(3))
        folder = shared_folder()
        writer = HeldWriter(folder)
        at_the_call = weights(job)
        saved = dcp.async_save(job.state(), storage_writer=writer, process_group=group)
        expected = job.train(range(3, 6))
        assert not saved.done()
        writer.may_write.set()
        saved.result()

        torch.manual_seed(99)
        resumed = Job(tables(*places, fbgemm=fbgemm), OPTIMIZERS[optimizer], **kwargs)
        resumed.load(folder)
        assert_same(weights(resumed), at_the_call)
        assert resumed.train(range(3, 6)) == expected
        assert_same(weights(resumed), weights(job))

    return check
