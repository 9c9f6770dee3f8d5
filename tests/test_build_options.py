from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def configure(build: Path, cuda: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", "-DSKBUILD=2"]
        + ["-DSKBUILD_STATE=editable", f"-DPython_EXECUTABLE={sys.executable}"],
        env={**os.environ, "PATH": path, "FLOWTT_CUDA": cuda, "FLOWTT_CUDA_ARCHS": "80 90"},
        capture_output=True,
        text=True,
    )


def test_options_are_read_at_every_build_into_the_same_folder(tmp_path: Path) -> None:
    first = configure(tmp_path, "OFF")
    assert first.returncode == 0, first.stderr
    assert "CUDA kernels: off (FLOWTT_CUDA=OFF)" in first.stdout
    second = configure(tmp_path, "perhaps")
    assert second.returncode != 0
    assert "FLOWTT_CUDA must be AUTO, ON or OFF; got 'PERHAPS'" in second.stderr
