from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "serve_model.py"


@pytest.mark.slow
def test_the_example_serves_what_it_trained(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(EXAMPLE), "--folder", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    logits = {
        name: float(logit) for name, logit in re.findall(r"^(\w+) \[(\S+)\]$", result.stdout, re.M)
    }
    assert list(logits) == ["trained", "loaded", "quantized", "served"]
    assert logits["trained"] != 0
    assert logits["loaded"] == pytest.approx(logits["trained"], rel=1e-5)
    assert logits["served"] == pytest.approx(logits["trained"], rel=1e-5)
    assert logits["quantized"] != logits["trained"]
    assert logits["quantized"] == pytest.approx(logits["trained"], abs=1e-3)


def test_the_page_shows_the_code_of_the_example() -> None:
    page = (ROOT / "docs" / "inference.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert len(blocks) >= 5
    example = EXAMPLE.read_text()
    flat = "\n".join(line.strip() for line in example.splitlines())
    for block in blocks:
        lines = [line.strip() for line in textwrap.dedent(block).strip().splitlines()]
        assert "\n".join(lines) in flat, block
    # Of the C++ program the schema counts, which is that of the operators.
    from torchrec_flowtt.ops.schemas import SCHEMAS

    program = (ROOT / "examples" / "serve_package.cpp").read_text()
    strings = "".join(re.findall(r'^ {6}"(.*)"', program, re.M))
    assert strings == "tt_embedding_bag" + SCHEMAS["tt_embedding_bag"]
