"""Runs checks under a real torchrun, and shows what the ranks printed when one fails.

A start costs some ten seconds, so a script holds many checks. It ends with::

    if __name__ == "__main__":
        run_on_rank({"name": check, ...})

and the test module asks for the outcomes once and looks at one a test::

    @pytest.fixture(scope="module")
    def outcomes():
        return run_script("ranks_training.py")
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_OUTCOMES = "FLOWTT_TEST_OUTCOMES"


class Outcomes:
    """What became of each check on each rank."""

    def __init__(self, by_rank: list[dict[str, str | None]], output: str) -> None:
        self._by_rank = by_rank
        self._output = output

    def require(self, check: str) -> None:
        """Assert that `check` ran on every rank and passed."""
        problems = []
        for rank, outcome in enumerate(self._by_rank):
            if check not in outcome:
                problems.append(f"rank {rank}: did not finish it")
            elif outcome[check] is not None:
                problems.append(f"rank {rank}:\n{outcome[check]}")
        assert not problems, "\n".join([f"check {check!r}", *problems, "output:", self._output])


def run_script(script: str, *arguments: str, ranks: int = 2, timeout: float = 120) -> Outcomes:
    """Run a script of this folder under torchrun on the CPU.

    Args:
        script: file name, next to this file.
        arguments: command-line arguments of the script.
        ranks: number of processes.
        timeout: seconds after which all of them are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            _OUTCOMES: folder,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(part for part in path if part),
        }
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={ranks}", str(Path(__file__).parent / script), *arguments),
        ]
        output = _run(command, environment, timeout)
        files = [Path(folder) / f"rank{rank}.json" for rank in range(ranks)]
        by_rank = [json.loads(f.read_text()) if f.exists() else {} for f in files]
    return Outcomes(by_rank, output[-20_000:])


def _run(command: list[str], environment: Mapping[str, str], timeout: float) -> str:
    with subprocess.Popen(
        command,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:
            # The agent's own children must go too: they may wait in a collective.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return process.communicate()[0] + f"\n(killed after {timeout} s)"


def run_on_rank(checks: Mapping[str, Callable[[], None]]) -> None:
    """Run checks in order in this process, one of a torchrun; stop at the first that fails."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=40))
    outcome: dict[str, str | None] = {}
    target = Path(os.environ[_OUTCOMES]) / f"rank{dist.get_rank()}.json"
    failed = False
    for name, check in checks.items():
        torch.manual_seed(0)
        try:
            check()
            dist.barrier()
            outcome[name] = None
        except BaseException:
            outcome[name] = traceback.format_exc()
            failed = True
        target.write_text(json.dumps(outcome))
        if failed:
            break
    # Without destroying the group first, which may wait for a rank that has failed.
    sys.stdout.flush()
    os._exit(1 if failed else 0)
