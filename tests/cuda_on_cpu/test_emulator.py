"""What the emulator reports, and what it refuses to translate."""

from __future__ import annotations

import pytest
import torch

from tests.cuda_on_cpu import build
from tests.cuda_on_cpu.emulated import forward
from tests.gpu.calls import Table, make_call


@pytest.mark.parametrize("choice", ["general", "tiled"])
def test_a_kernel_that_stops_is_an_error(
    choice: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", choice)
    call = make_call([Table((5, 6, 7), (4, 4, 4), (8, 3))])
    right = forward(call)
    call.indices[-1] += 1000
    with pytest.raises(RuntimeError, match="cudaErrorLaunchFailure"):
        forward(call)
    assert "trap" in capfd.readouterr().err
    call.indices[-1] -= 1000
    assert torch.equal(forward(call), right)


def test_rewritten_constructs() -> None:
    source = """
      extern __shared__ __align__(16) unsigned char scratch[];
      __shared__ Item items[kWarps][32];
      kernel<core_t><<<dim3(a, b), threads, bytes, stream>>>(x);  // asm <<< in a comment
    """
    text = build.rewritten(source, "kernel.cu")
    assert "unsigned char* const scratch = cuda_on_cpu::dynamic_shared<unsigned char>();" in text
    assert "auto& items = cuda_on_cpu::static_shared<Item[kWarps][32]>([] {});" in text
    assert "cuda_on_cpu::launch(kernel<core_t>, dim3(a, b), threads, bytes, stream)(x);" in text


def test_ptx_outside_of_its_headers_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel.cuh: 'asm' has no counterpart"):
        build.rewritten('asm volatile("exit;");', "kernel.cuh")
