"""Steps of 16-bit cores that are rounded up or down at random."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cuda_on_cpu.emulated import Device, operators

ROWS, COLUMNS = 64, 48


def step(value: float, delta: float, dtype: torch.dtype, steps: int = 0) -> Tensor:
    """`value - delta` in every element of a core [ROWS, 1, COLUMNS, 1]."""
    cores = [torch.full((ROWS, 1, COLUMNS, 1), value, dtype=dtype), torch.ones(1, 1, 1, 1)]
    cores[1] = cores[1].to(dtype)
    operators(Device()).tt_embedding_bag_backward_update(
        torch.ones(ROWS, COLUMNS),
        cores,
        [],
        [],
        torch.arange(ROWS),
        torch.arange(ROWS + 1),
        None,
        [2],
        [ROWS],
        [0],
        0,
        torch.tensor(delta),
        torch.tensor(steps),
        "exact_sgd",
        0.0,
        0.0,
        0.0,
        0.0,
        False,
        None,
        True,
    )
    return cores[0]


# Value, distance of the values below it.
CASES = {
    "bf16": (torch.bfloat16, 1.0, 2.0**-8),
    "fp16": (torch.float16, 1.0, 2.0**-11),
    "fp16, negative": (torch.float16, -1.0, 2.0**-10),
    "fp16, denormal": (torch.float16, 2.0**-20, 2.0**-24),
    "fp16, negative denormal": (torch.float16, -(2.0**-20), 2.0**-24),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("share", [0.125, 0.5, 0.75])
def test_nothing_is_lost_on_average(case: str, share: float) -> None:
    dtype, value, distance = CASES[case]
    stepped = step(value, share * distance, dtype).double().reshape(ROWS, COLUMNS)
    lower = stepped == value - distance
    assert ((stepped == value) | lower).all()
    elements = ROWS * COLUMNS
    deviation = (share * (1 - share) / elements) ** 0.5
    assert abs(lower.double().mean().item() - share) < 5 * deviation
    # Neither rows nor columns are alike.
    for dim, count in ((0, ROWS), (1, COLUMNS)):
        assert lower.double().mean(dim).std() < 2 * (share * (1 - share) / count) ** 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_step_decides(dtype: torch.dtype) -> None:
    first = step(1.0, 2.0**-13, dtype)
    assert torch.equal(first, step(1.0, 2.0**-13, dtype))
    assert not torch.equal(first, step(1.0, 2.0**-13, dtype, steps=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [0.0, 1.5, -3.0, 2.0**-14, 60000.0, float("inf"), float("nan")])
def test_values_that_need_no_rounding(dtype: torch.dtype, value: float) -> None:
    exact = torch.tensor(value, dtype=dtype)
    expected = exact.expand(ROWS, 1, COLUMNS, 1)
    torch.testing.assert_close(
        step(exact.item(), 0.0, dtype), expected, rtol=0, atol=0, equal_nan=True
    )


def test_large_halves_stay_finite() -> None:
    assert (step(65504.0, -15.0, torch.float16) == 65504.0).all()
