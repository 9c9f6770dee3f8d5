from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


# The example as a program, and then the threads that are left of its process.
PROGRAM = """
import os, pathlib, runpy
runpy.run_path("examples/mixed_tables.py", run_name="__main__")
threads = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
pathlib.Path(__file__).with_name("threads" + os.environ["RANK"]).write_text(" ".join(threads))
"""


@pytest.mark.slow
def test_the_example_trains_on_two_processes_and_leaves_no_group_behind(tmp_path: Path) -> None:
    """A thread of gloo that outlives the interpreter aborts the process, once in many runs."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*launch, str(program)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stderr
    assert "table='ads', kernel='flowtt'" in result.stdout
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+)", result.stdout)]
    assert len(losses) == 10
    assert all(0.3 < loss < 1.5 for loss in losses)
    for rank in range(2):
        assert "gloo" not in (tmp_path / f"threads{rank}").read_text()
