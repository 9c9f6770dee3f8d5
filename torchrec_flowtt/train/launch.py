"""Starts the processes of a run through torchrun's own launcher, from Python."""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from torchrec_flowtt.config import CheckpointError, JobError
from torchrec_flowtt.train.checkpoint_files import latest_checkpoint
from torchrec_flowtt.train.processes import report_error

INTERRUPTED = 130


def launch_training(arguments: Sequence[str], processes: int, checkpoint_folder: Path) -> int:
    """Runs ``python -m torchrec_flowtt.train ARGUMENTS`` in ``processes`` processes and waits.

    If one is killed, the last line on standard error says which one and how to go on from the
    checkpoints in ``checkpoint_folder``.

    Returns:
        The exit code of the process that failed first, 130 after SIGINT or SIGTERM, else 0.
    """
    # By name, as torch gives some of them a level of their own.
    for name in ("torch.distributed.elastic", *logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # torchrun does the same: without it, every process would take all cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=str(uuid.uuid4()),
        max_restarts=0,
        monitor_interval=0.1,
    )
    command = ["-u", "-m", "torchrec_flowtt.train", *arguments]
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            # SIGTERM is what the launcher ends the others with.
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                name = signal.Signals(-failure.exitcode).name
                report_error(
                    JobError(f"rank {rank} died ({name}); {_how_to_go_on(checkpoint_folder)}")
                )
                return JobError.exit_code
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 1
    except SignalException:
        return INTERRUPTED
    return 0


def _how_to_go_on(checkpoint_folder: Path) -> str:
    try:
        step = int(latest_checkpoint(checkpoint_folder).name.removeprefix("step-"))
    except CheckpointError:
        return "there is no checkpoint yet, start again without --resume"
    return f"the last checkpoint is step {step}, --resume continues from there"
