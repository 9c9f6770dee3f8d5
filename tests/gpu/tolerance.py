"""Comparison with float64 results."""

from __future__ import annotations

import torch
from torch import Tensor

# Largest error relative to the largest expected value: accumulation is in float32 (float64), then
# rounded once to the result's dtype.
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 1e-3,
    torch.bfloat16: 8e-3,
}


def assert_matches(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """The largest error is within the tolerance of `actual`'s dtype."""
    assert actual.shape == expected.shape
    if actual.numel() == 0:
        return
    tolerance = TOLERANCES[actual.dtype] if tolerance is None else tolerance
    expected = expected.detach().cpu().double()
    actual = actual.detach().cpu().double()
    assert actual.isfinite().all()
    error = (actual - expected).abs().max().item()
    scale = expected.abs().max().item()
    assert error <= tolerance * max(scale, 1e-30), (
        f"error {error:.3g} is {error / max(scale, 1e-30):.3g} of the largest value {scale:.3g}, "
        f"expected at most {tolerance:.3g}"
    )
