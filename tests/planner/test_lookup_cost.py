from __future__ import annotations

import pytest

from torchrec_flowtt.planner import ArithmeticRate, TTLookupCost
from torchrec_flowtt.shapes import TTSpec

SPEC = TTSpec(24, 8, p_shapes=(2, 3, 4), q_shapes=(2, 2, 2), tt_ranks=(4, 4))
LAST = 2 * (2 * 2) * 4 * 2  # the prefix, 4 x 4, times the last slice, 4 x 2
PREFIX = 2 * 2 * 4 * (2 * 4)  # the first slice, 2 x 4, times the second, 4 x (2 * 4)


def test_flops_without_sharing() -> None:
    assert TTLookupCost().flops(SPEC, 10) == 10 * (LAST + PREFIX) == 10 * SPEC.flops_per_lookup


def test_shared_prefixes_are_computed_once() -> None:
    cost = TTLookupCost(prefix_sharing=0.75)
    assert cost.flops(SPEC, 100) == pytest.approx(100 * LAST + 25 * PREFIX)


def test_two_cores_have_no_prefix() -> None:
    spec = TTSpec(24, 8, p_shapes=(4, 6), q_shapes=(2, 4), tt_ranks=(4,))
    assert TTLookupCost(prefix_sharing=0.5).flops(spec, 1) == spec.flops_per_lookup


def test_times() -> None:
    cost = TTLookupCost(rates={"cuda": ArithmeticRate(forward=1000.0, backward=500.0)})
    flops = cost.flops(SPEC, 7)
    assert cost.forward_ms(SPEC, 7, "cuda") == pytest.approx(flops / 1000)
    assert cost.backward_ms(SPEC, 7, "cuda") == pytest.approx(3 * flops / 500)
    assert cost.forward_ms(SPEC, 7, "mtia") == 0.0
    assert cost.backward_ms(SPEC, 7, "mtia") == 0.0


@pytest.mark.parametrize("sharing", [-0.1, 1.0, 2.0])
def test_sharing_out_of_range(sharing: float) -> None:
    with pytest.raises(ValueError, match=f"prefix_sharing.*{sharing}"):
        TTLookupCost(prefix_sharing=sharing)


@pytest.mark.parametrize(("forward", "backward"), [(0.0, 1.0), (1.0, -1.0)])
def test_rates_are_positive(forward: float, backward: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        ArithmeticRate(forward=forward, backward=backward)
