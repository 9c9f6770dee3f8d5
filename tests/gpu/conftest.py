"""The whole folder needs a CUDA device and the CUDA kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips every test of this folder on machines without a GPU, and there only."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(skip)


@pytest.fixture
def tiled_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables that have a tiling take the tiled kernels however small the batch."""
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", "tiled")
    # A workspace must not depend on what its memory held before: fill the allocator's with NaN.
    poison = [torch.full((1 << 22,), torch.nan, device="cuda") for _ in range(4)]
    del poison
