"""Starts training jobs as a user would, with a time limit, and looks at what they left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
FAULTY_JOB = Path(__file__).parent / "faulty_job.py"

# Small enough for a step of a few milliseconds; TT tables in both of their shardings.
CONFIG = """
data: {name: synthetic, cross_rows: 4096, history_length: 5}
tables:
  - {name: cross_user_genre, kernel: flowtt, tt_ranks: 4, sharding: table_wise}
  - {name: cross_occupation_age_item, kernel: flowtt, tt_ranks: 4, sharding: data_parallel}
  - {name: gender, sharding: data_parallel}
  - {name: "*", sharding: table_wise}
model: {embedding_dim: 8, dense_layers: [8], over_layers: [8, 1]}
optimizer: {sparse: {learning_rate: 0.05}}
train: {epochs: 3, batch_size: 40, log_every: 1}
device: cpu
"""


@dataclass(frozen=True)
class Finished:
    """How a job ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def error_lines(self) -> list[str]:
        """The job's own error lines."""
        return [line for line in self.stderr.splitlines() if line.startswith("flowtt: error: ")]


def flowtt(*arguments: str) -> list[str]:
    """The console script's command line."""
    return [sys.executable, "-m", "torchrec_flowtt.cli.main", *arguments]


def torchrun(*arguments: str, ranks: int = 2, script: Path | None = None) -> list[str]:
    """The command line of torchrun for the job, or for a script that wraps it."""
    target = ["-m", "torchrec_flowtt.train"] if script is None else [str(script)]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc-per-node={ranks}", *target, *arguments]


def run(
    command: Sequence[str],
    *,
    timeout: float = 90.0,
    on_line: Callable[[str, int], None] | None = None,
    **environment: str,
) -> Finished:
    """Runs a command to its end; kills it and its children, and fails, when it takes too long.

    Args:
        command: command line.
        timeout: seconds.
        on_line: called with each line of standard output and the process group's id.
        **environment: further variables.
    """
    variables = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        **environment,
    }
    with subprocess.Popen(
        command,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        lines: list[str] = []
        try:
            if on_line is not None:
                assert process.stdout is not None
                for line in process.stdout:
                    lines.append(line)
                    on_line(line, process.pid)
            stdout, stderr = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            raise AssertionError(
                f"still running after {timeout} s: {command}\n{stdout}\n{stderr}"
            ) from None
    return Finished(process.returncode, "".join(lines) + (stdout or ""), stderr)


def metrics(run_folder: Path) -> dict[str, Any]:
    """The run's metrics.json."""
    content: dict[str, Any] = json.loads((run_folder / "metrics.json").read_text())
    return content


def checkpoints(run_folder: Path) -> list[str]:
    """Names of everything in the run's checkpoint folder but the lock."""
    names = (path.name for path in (run_folder / "checkpoints").iterdir())
    return sorted(name for name in names if name != ".lock")
