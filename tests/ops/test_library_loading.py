"""A missing library, a broken library, and what is said about either."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torchrec_flowtt
from torchrec_flowtt.ops import cpu_kernel_level, library

WITHOUT_LIBRARY = """
import torch, torchrec_flowtt
import torchrec_flowtt.ops
from torchrec_flowtt.ops import library_path, cuda_kernels_built
print(library_path())
assert not cuda_kernels_built()
cores = [torch.ones(2, 1, 2, 1), torch.ones(2, 1, 2, 1)]
bags = (torch.tensor([0]), torch.tensor([0, 1]), None, [2], [4], [0], 0)
call = (cores, *bags, torch.float32, False, False)
operator = torch.ops.flowtt.tt_embedding_bag.default
keys = torch._C.DispatchKeySet
for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA):
    try:
        operator.redispatch(keys(key), *call)
    except NotImplementedError as error:
        print(error)
meta = [core.to("meta") for core in cores]
print(tuple(operator(meta, call[1].to("meta"), call[2].to("meta"), *call[3:]).shape))
"""


def test_package_without_library(tmp_path: Path) -> None:
    package = Path(torchrec_flowtt.__file__).parent
    shutil.copytree(
        package, tmp_path / "torchrec_flowtt", ignore=shutil.ignore_patterns("lib", "__pycache__")
    )
    # Without `site`, so that the import hook of an editable installation does not find the package
    # with its library first.
    search = [str(tmp_path), *(path for path in sys.path if path.endswith("site-packages"))]
    result = subprocess.run(
        [sys.executable, "-S", "-c", WITHOUT_LIBRARY],
        cwd=tmp_path,
        env={"PYTHONPATH": os.pathsep.join(search), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    path, cpu, cuda, shape = result.stdout.splitlines()
    assert path == str(tmp_path / "torchrec_flowtt" / "lib" / "libtorchrec_flowtt.so")
    assert cpu.startswith(f"flowtt::tt_embedding_bag: the compiled kernels are missing: {path}")
    assert "make build" in cpu
    assert "FLOWTT_CUDA=ON" in cuda and path in cuda
    assert shape == "(1, 4)"


def test_broken_library_is_an_import_error(tmp_path: Path) -> None:
    broken = tmp_path / "libtorchrec_flowtt.so"
    broken.write_bytes(b"no shared object")
    with pytest.raises(ImportError, match="cannot be loaded under torch") as caught:
        library.load(broken)
    message = str(caught.value)
    assert str(broken) in message and "make build" in message
    assert isinstance(caught.value.__cause__, OSError)


def test_cpu_only_library_explains_cuda(tmp_path: Path) -> None:
    path = tmp_path / "libtorchrec_flowtt.so"
    path.touch()
    message = library.explain_missing_kernels("CUDA", path)
    assert f"on a CUDA device, but {path} was built without CUDA kernels" in message
    assert "FLOWTT_CUDA=ON" in message and "to the CPU" in message


def test_level_of_the_cpu_kernels() -> None:
    assert cpu_kernel_level() in ("avx512", "avx2", "baseline")
