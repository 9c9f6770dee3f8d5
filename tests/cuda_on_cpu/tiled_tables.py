"""Tables for every kernel of the tiled path, and how exact their results are."""

from __future__ import annotations

import torch

from tests.gpu.calls import Table

# One for each kernel, and sizes that no tile divides.
TABLES = {
    "16x4": Table((20, 22, 25), (4, 4, 4), (16, 16), 10_007),
    "16x8": Table((7, 11, 13), (4, 4, 8), (16, 16)),
    "32x4": Table((5, 3, 40), (4, 4, 4), (32, 32)),
    "32x8": Table((20, 22, 25), (4, 4, 8), (32, 32), 10_999),
    "padded": Table((6, 5, 4), (3, 2, 7), (5, 30)),
    "one row": Table((1, 1, 1), (4, 4, 8), (32, 32)),
    "wide 32": Table((9, 10, 11), (3, 5, 7), (19, 24)),
    "wide 64": Table((20, 22, 25), (4, 4, 8), (64, 50)),
    "wide 96": Table((9, 10, 11), (4, 4, 8), (96, 70)),
    "wide 128": Table((9, 10, 11), (2, 4, 4), (128, 100)),
    "wide, whole blocks": Table((9, 10, 11), (8, 4, 8), (64, 96)),
    "wide, 512 columns": Table((5, 6, 7), (8, 8, 8), (33, 33)),
    "2 cores, rank 32": Table((90, 110), (8, 16), (32,), 9_889),
    "2 cores, rank 64": Table((9, 30), (16, 32), (50,)),
    "2 cores, rank 128": Table((9, 130), (5, 19), (70,)),
    "4 cores": Table((10, 12, 9, 11), (4, 4, 4, 2), (32, 32, 32), 11_001),
    "4 cores, odd": Table((6, 5, 4, 3), (3, 5, 3, 5), (17, 40, 9)),
    "4 cores, ranks 64": Table((5, 6, 7, 8), (4, 4, 2, 8), (64, 64, 64)),
    "4 cores, one column": Table((3, 4, 5, 6), (1, 1, 1, 1), (2, 3, 4)),
}
# Some of each kind, where all of them would take long.
SOME = ["32x8", "padded", "wide 64", "2 cores, rank 32", "4 cores"]
# Relative errors.
THREE_PRODUCTS = 2e-6
ONE_PRODUCT = 1e-3


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """By the norm of the difference, so that one wrong row of thousands is found."""
    assert actual.shape == expected.shape and actual.isfinite().all()
    rows = (actual.double() - expected).norm(dim=1)
    scale = expected.norm() / max(expected.shape[0], 1) ** 0.5
    assert (rows <= 8 * tolerance * scale).all(), f"row {int(rows.argmax())}: {rows.max() / scale}"
    assert rows.norm() <= tolerance * expected.norm()
