"""The training job with a fault in one of its ranks, described by three variables.

FAULT_KIND: ``interrupt`` (the rank gets SIGINT), ``raise`` (an exception), ``disk`` (the rank
can no longer write its part of a checkpoint), ``kill`` (the rank, which must be 0, gets SIGKILL
between the data and the metadata of a checkpoint). FAULT_STEP: after which step of this process.
FAULT_RANK: which rank.
"""

from __future__ import annotations

import errno
import os
import signal

from torch.distributed.checkpoint.filesystem import FileSystemWriter

from torchrec_flowtt.train import reports
from torchrec_flowtt.train.command import exit_with, train

steps_done = 0
advance = reports.ProgressDisplay.advance
write_data = FileSystemWriter.write_data
finish = FileSystemWriter.finish


def install(kind: str, step: int) -> None:
    """Makes this process fail after ``step`` of its steps."""

    def advance_or_fail(self, examples):
        global steps_done
        steps_done += 1
        advance(self, examples)
        if steps_done == step and kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if steps_done == step and kind == "raise":
            raise ZeroDivisionError("injected")

    def write_or_fail(self, plan, planner):
        if steps_done >= step and kind == "disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_data(self, plan, planner)

    def finish_or_die(self, metadata, results):
        if steps_done >= step and kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        finish(self, metadata, results)

    reports.ProgressDisplay.advance = advance_or_fail
    FileSystemWriter.write_data = write_or_fail
    FileSystemWriter.finish = finish_or_die


if __name__ == "__main__":
    if os.environ["FAULT_RANK"] == os.environ["RANK"]:
        install(os.environ["FAULT_KIND"], int(os.environ["FAULT_STEP"]))
    exit_with(lambda: train.main(standalone_mode=False))
