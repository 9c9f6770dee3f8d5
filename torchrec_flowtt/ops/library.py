"""Loads ``lib/libtorchrec_flowtt.so``, which holds the C++ and CUDA kernels.

A missing library is no error at import, so that shapes, configuration and planning work without
it; the operators then say what is missing. A library that is there but cannot be loaded is an
error at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

from torchrec_flowtt.ops.schemas import NAMESPACE, SCHEMAS

_FILE_NAME = "libtorchrec_flowtt.so"
_BUILD_HINT = (
    "Build it with `make build`, or `pip install --no-build-isolation -e .` in a checkout of "
    "torchrec-flowtt (a C++20 compiler and the installed torch are all it needs)."
)
_CUDA_HINT = (
    "Put nvcc on PATH and build again with `FLOWTT_CUDA=ON FLOWTT_CUDA_ARCHS=90 pip install "
    "--no-build-isolation -e .` (90 for H100 and H200; use your GPU's compute capability), or "
    "move the module and its inputs to the CPU."
)


def library_path() -> Path:
    """The file the kernels are loaded from, whether or not it exists."""
    return Path(__file__).resolve().parent.parent / "lib" / _FILE_NAME


def cuda_kernels_built() -> bool:
    """Whether the loaded library has CUDA kernels."""
    return _has_kernel("CUDA") and "CUDA" not in _explained


_explained: set[str] = set()


def _has_kernel(dispatch_key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(
        f"{NAMESPACE}::tt_embedding_bag", dispatch_key
    )


def _explain(dispatch_key: str, message: str) -> None:
    """Registers kernels that raise ``message`` where the library has none."""

    def explaining(name: str) -> Callable[..., NoReturn]:
        def kernel(*_: object, **__: object) -> NoReturn:
            raise NotImplementedError(f"{NAMESPACE}::{name}: {message}")

        return kernel

    for name in SCHEMAS:
        torch.library.impl(f"{NAMESPACE}::{name}", dispatch_key, explaining(name))
    _explained.add(dispatch_key)


def load(path: Path | None = None) -> None:
    """Loads the kernels and explains the missing ones. Called once, at import.

    Args:
        path: the library's file; default ``library_path()``.

    Raises:
        ImportError: the file exists but cannot be loaded.
    """
    path = library_path() if path is None else path
    if path.exists():
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            raise ImportError(
                f"{path} cannot be loaded under torch {torch.__version__}: {error}. "
                "It was built for another platform, or for a torch newer than this one "
                f"(2.11 or later is needed). Remove the file, or replace it. {_BUILD_HINT}"
            ) from error
    if not _has_kernel("CPU"):
        _explain("CPU", f"the compiled kernels are missing: {path} does not exist. {_BUILD_HINT}")
    if not _has_kernel("CUDA"):
        what = (
            f"{path} was built without CUDA kernels, and the tensors are on a CUDA device."
            if path.exists()
            else f"the compiled kernels are missing: {path} does not exist."
        )
        _explain("CUDA", f"{what} {_CUDA_HINT}")
