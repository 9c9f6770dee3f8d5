from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_example_trains_on_two_processes() -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run(
        [*launch, "examples/mixed_tables.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stderr
    assert "table='ads', kernel='flowtt'" in result.stdout
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+)", result.stdout)]
    assert len(losses) == 10
    assert all(0.3 < loss < 1.5 for loss in losses)
