"""Exported programs on CUDA: `torch.export`, AOTInductor, a fresh process.

``tests/inference/test_export.py`` does the same on the CPU.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from tests.exported_programs import (
    SIZES,
    Lookups,
    check_lookups,
    export_lookups,
    lookup_inputs,
    serve_in_fresh_process,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strict", [False, True])
def test_exported_lookups(dtype: torch.dtype, strict: bool) -> None:
    module = Lookups("cuda", dtype)
    program = export_lookups(module, "cuda", strict)
    check_lookups(program.module(), module, "cuda")


@pytest.mark.skipif(
    shutil.which("g++") is None or cpp_extension.CUDA_HOME is None,
    reason="AOTInductor needs g++ and the CUDA toolkit",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_lookups(dtype: torch.dtype, tmp_path: Path) -> None:
    module = Lookups("cuda", dtype)
    program = export_lookups(module, "cuda", strict=False)
    package = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "lookups.pt2")
    )
    check_lookups(torch._inductor.aoti_load_package(package), module, "cuda")
    requests = [lookup_inputs(*size, "cuda") for size in SIZES]
    answers = serve_in_fresh_process(Path(package), requests, tmp_path)
    for request, answer in zip(requests, answers, strict=True):
        torch.testing.assert_close(answer, module(*request).detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strict", [False, True])
def test_exported_collection(strict: bool) -> None:
    """Where TorchRec and FBGEMM are installed."""
    pytest.importorskip("torchrec")
    pytest.importorskip("fbgemm_gpu")
    from tests.inference.exported_collections import check_collection, export_collection
    from tests.inference.served_models import collection, mixed_tables

    ebc = collection(mixed_tables(), device="cuda").eval()
    check_collection(export_collection(ebc, strict=strict).module(), ebc)
