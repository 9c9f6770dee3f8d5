"""Loads ``lib/libtorchrec_flowtt.so``, which holds the C++ and CUDA kernels.

A missing library is no error at import, so that shapes, configuration and planning work without
it; the operators then say what is missing. A library that is there but cannot be loaded is an
error at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

from torchrec_flowtt.ops.schemas import NAMESPACE, SCHEMAS

_FILE_NAME = "libtorchrec_flowtt.so"
_BUILD_HINT = (
    "Build it in a checkout of torchrec-flowtt with `make build`, or with `pip install "
    "--no-build-isolation -e .` (it needs a C++20 compiler and the installed torch)."
)
_CUDA_HINT = (
    "Put nvcc on PATH and build again with `FLOWTT_CUDA=ON FLOWTT_CUDA_ARCHS=90 pip install "
    "--no-build-isolation -e .` (90 for H100 and H200; use your GPU's compute capability), or "
    "move the module and its inputs to the CPU."
)

_explained: set[str] = set()  # dispatch keys whose kernels only explain what is missing


def library_path() -> Path:
    """The file the kernels are loaded from, whether or not it exists."""
    return Path(__file__).resolve().parent.parent / "lib" / _FILE_NAME


def cuda_kernels_built() -> bool:
    """Whether the loaded library has CUDA kernels."""
    return _has_kernel("CUDA") and "CUDA" not in _explained


def cpu_kernel_level() -> str:
    """Instruction set of the CPU kernels in use: ``"avx512"``, ``"avx2"`` or ``"baseline"``.

    The library takes the best one the machine has; ``FLOWTT_CPU_LEVEL`` in the environment, set
    before the first lookup, asks for a lower one.

    Raises:
        FileNotFoundError: the library has not been built.
    """
    path = library_path()
    if not path.exists():
        raise FileNotFoundError(explain_missing_kernels("CPU", path))
    function = ctypes.CDLL(str(path)).flowtt_cpu_kernel_level
    function.restype = ctypes.c_char_p
    return bytes(function()).decode()


def explain_missing_kernels(dispatch_key: str, path: Path) -> str:
    """What to tell someone who calls an operator that has no kernel for ``dispatch_key``."""
    if not path.exists():
        what = f"the compiled kernels are missing: {path} does not exist."
    elif dispatch_key == "CUDA":
        what = f"the tensors are on a CUDA device, but {path} was built without CUDA kernels."
    else:
        what = f"{path} has no {dispatch_key} kernels: it belongs to another version."
    return f"{what} {_CUDA_HINT if dispatch_key == 'CUDA' else _BUILD_HINT}"


def load(path: Path | None = None) -> None:
    """Loads the kernels and lets the missing ones explain themselves. Called once, at import.

    Args:
        path: the library's file; default ``library_path()``.

    Raises:
        ImportError: the file exists but cannot be loaded.
    """
    path = library_path() if path is None else path
    if path.exists():
        try:
            torch.ops.load_library(str(path))
        except (OSError, RuntimeError) as error:
            raise ImportError(
                f"{path} cannot be loaded under torch {torch.__version__}: {error}. It was built "
                "for another platform or for other versions (torch 2.11 or later is needed). "
                f"Remove the file, or replace it. {_BUILD_HINT}"
            ) from error
    for dispatch_key in ("CPU", "CUDA"):
        if not _has_kernel(dispatch_key):
            _register_explanation(dispatch_key, explain_missing_kernels(dispatch_key, path))


def _has_kernel(dispatch_key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        f"{NAMESPACE}::tt_embedding_bag", dispatch_key
    )


def _register_explanation(dispatch_key: str, message: str) -> None:
    def explaining(name: str) -> Callable[..., NoReturn]:
        def kernel(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"{NAMESPACE}::{name}: {message}")

        return kernel

    for name in SCHEMAS:
        torch.library.impl(f"{NAMESPACE}::{name}", dispatch_key, explaining(name))
    _explained.add(dispatch_key)
