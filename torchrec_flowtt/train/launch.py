"""Starts the processes of a run through torchrun's own launcher, from Python."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

INTERRUPTED = 130


def launch_training(arguments: Sequence[str], processes: int) -> int:
    """Runs ``python -m torchrec_flowtt.train ARGUMENTS`` in ``processes`` processes and waits.

    Returns:
        The exit code of the process that failed first, 130 after SIGINT or SIGTERM, else 0.
    """
    for name in ("torch.distributed.elastic", "torch.distributed.launcher"):
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
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 1
    except SignalException:
        return INTERRUPTED
    return 0
