"""Every instruction set the machine has gives right values, not only the best one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrec_flowtt.ops import cpu_kernel_level

pytestmark = pytest.mark.slow

LEVELS = ("baseline", "avx2", "avx512")
SELECTED = "special_values or (test_shapes and (primes or two or four) and not dtype3)"


@pytest.mark.parametrize("level", LEVELS[:-1])
def test_lower_level(level: str) -> None:
    if LEVELS.index(cpu_kernel_level()) <= LEVELS.index(level):
        pytest.skip(f"{level} is the level in use, or beyond this machine")
    root = Path(__file__).resolve().parents[2]
    tests = root / "tests" / "ops" / "test_lookup_values.py"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        + [str(tests), "-k", SELECTED],
        cwd=root,
        env={**os.environ, "FLOWTT_CPU_LEVEL": level},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
