from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PTXAS = """
ptxas info    : Compiling entry function '_ZN6flowtt4cuda6kernelILi32EEEvi' for 'sm_90'
ptxas info    : Function properties for _ZN6flowtt4cuda6kernelILi32EEEvi
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 5632 bytes smem, 1234 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN6flowtt4cuda6kernelILi16EEEvi' for 'sm_90'
ptxas info    : Function properties for _ZN6flowtt4cuda6kernelILi16EEEvi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
ptxas info    : Compiling entry function '_ZN3cub12sort_kernelEPmi' for 'sm_90'
ptxas info    : Function properties for _ZN3cub12sort_kernelEPmi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 77 registers, used 0 barriers
"""
DUMP = """
 Function _ZN6flowtt4cuda6kernelILi32EEEvi:
  REG:128 STACK:16 SHARED:5632 LOCAL:0 CONSTANT[0]:1234 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_report", ROOT / "ci/kernel_report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernel_report", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="needs c++filt")
def test_the_report_replaces_the_last_one(module: ModuleType, tmp_path: Path) -> None:
    log, page = tmp_path / "build.log", tmp_path / "kernels.md"
    log.write_text(PTXAS)
    page.write_text(f"before\n{module.BEGIN}\nold\n{module.END}\nafter\n")
    for _ in range(2):
        assert module.main([str(log), str(page)]) == 0
        before, *rows, after = page.read_text().strip().splitlines()
        assert (before, after) == ("before", "after") and "old" not in rows
        assert "| `kernel<32>` | 128 | 5,632 | 16 | 8 / 4 |" in rows
        assert "| `kernel<16>` | 40 | 0 | 0 | 0 |" in rows
        assert not any("sort" in row for row in rows)  # a library's


def test_resources_of_a_library(module: ModuleType) -> None:
    (found,) = module.parse(DUMP.splitlines())
    assert (found.registers, found.shared, found.stack, found.spill_stores) == (128, 5632, 16, None)


def test_a_log_without_kernels_is_refused(module: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_text("nothing of interest\n")
    assert module.main([str(log), str(tmp_path / "kernels.md")]) == 1
