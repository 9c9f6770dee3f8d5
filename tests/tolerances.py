"""One table of tolerances by dtype, and the comparison that uses it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Largest error, relative to the largest entry of the expected tensor.

    Relative to the whole tensor and not to each entry, because an entry near zero is a difference
    of large terms, whose rounding errors stay.
    """

    relative: float


# Results are accumulated in float32 (float64 for float64) and rounded once, to the stored dtype.
TOLERANCES = {
    torch.float64: Tolerance(1e-12),
    torch.float32: Tolerance(2e-6),
    torch.float16: Tolerance(1e-3),
    torch.bfloat16: Tolerance(8e-3),
}


def assert_close(
    actual: Tensor, expected: Tensor, what: str, slack: float = 1.0, terms: Tensor | None = None
) -> None:
    """Compares a result with its float64 reference.

    Args:
        actual: the result; its dtype decides the tolerance.
        expected: float64, same shape.
        what: named in the message.
        slack: factor on the tolerance, where errors grow with the number of terms.
        terms: sums of the magnitudes of the terms of each entry. Where there are few entries all
            of them may have cancelled, which leaves the errors of the sums, in the accumulation
            dtype; without it they are taken not to have.

    Raises:
        AssertionError: shapes differ, or an error is too large; names the worst entry.
    """
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, not {expected.shape}"
    if expected.numel() == 0:
        return
    error = (actual.to(torch.float64) - expected).abs()
    scale = max(expected.abs().max().item(), 1e-30)
    allowed = TOLERANCES[actual.dtype].relative * slack * scale
    if terms is not None:
        summed = torch.float64 if actual.dtype == torch.float64 else torch.float32
        allowed += TOLERANCES[summed].relative * slack * terms.abs().max().item()
    worst = int(error.argmax())
    value = error.flatten()[worst].item()
    assert value <= allowed, (
        f"{what}: error {value:.3e} > {allowed:.3e} at flat position {worst}: "
        f"{actual.flatten()[worst].item()} instead of {expected.flatten()[worst].item()}"
    )
