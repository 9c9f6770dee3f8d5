from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_a_small_workload_gives_equal_outputs_and_a_complete_report(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    arguments = ["--num-embeddings", "990", "--p-shapes", "9", "10", "11", "--batch-size", "32"]
    result = subprocess.run(
        [sys.executable, "benchmarks/cpu_embedding_bag.py", *arguments]
        + ["--pooling-factor", "3", "--iterations", "2", "--output", str(output)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(output.read_text())
    assert report["largest_relative_difference_of_tt_outputs"] < 1e-5
    assert [r["name"] for r in report["results"]] == ["flowtt", "unique + bmm", "nn.EmbeddingBag"]
    for times in (r[phase] for r in report["results"] for phase in ("forward_ms", "training_ms")):
        assert 0 < times["p10"] <= times["p50"] <= times["p90"]
    assert report["commit"] and report["versions"]["torch"] and report["command"]
