from __future__ import annotations

import pytest

from torchrec_flowtt.planner import ArithmeticRate, LookupLoad, TTLookupCost
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
    assert cost.forward_ms(SPEC, LookupLoad(7), "cuda") == pytest.approx(flops / 1000)
    assert cost.backward_ms(SPEC, LookupLoad(7), "cuda") == pytest.approx(3 * flops / 500)
    assert cost.forward_ms(SPEC, LookupLoad(7), "mtia") == 0.0
    assert cost.backward_ms(SPEC, LookupLoad(7), "mtia") == 0.0


@pytest.mark.parametrize("sharing", [-0.1, 1.0, 2.0])
def test_sharing_out_of_range(sharing: float) -> None:
    with pytest.raises(ValueError, match=f"prefix_sharing.*{sharing}"):
        TTLookupCost(prefix_sharing=sharing)


@pytest.mark.parametrize(("forward", "backward"), [(0.0, 1.0), (1.0, -1.0)])
def test_rates_are_positive(forward: float, backward: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        ArithmeticRate(forward=forward, backward=backward)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"ids": "normal"}, ValueError, "ids must be 'uniform' or 'zipf', got 'normal'"),
        ({"precision": "bf16"}, ValueError, "precision must be .*, got 'bf16'"),
        ({"rates": 5}, TypeError, "rates must be a mapping.*got int"),
        ({"calibration": "h200.json"}, TypeError, "Calibration.load.*got str"),
    ],
)
def test_wrong_arguments(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TTLookupCost(**arguments)


@pytest.mark.parametrize("field", ["lookups", "pooling_factor", "call_lookups"])
@pytest.mark.parametrize("value", [-5.0, float("nan"), float("inf")])
def test_loads_are_checked(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must be finite and at least 0, got {value}"):
        LookupLoad(**{"lookups": 1.0, field: value})


def test_measured_times_take_the_place_of_the_arithmetic() -> None:
    cost = TTLookupCost.default("cuda")
    calibration = cost.calibration
    assert calibration is not None and cost.is_measured("cuda") and not cost.is_measured("cpu")
    load = LookupLoad(50_000, pooling_factor=3.0, call_lookups=200_000)
    for phase, ms in (("forward", cost.forward_ms), ("backward", cost.backward_ms)):
        us = calibration.us(
            SPEC, 50_000, phase=phase, pooling_factor=3.0, call_lookups=200_000, ids="zipf"
        )
        assert ms(SPEC, load, "cuda") == pytest.approx(us / 1e3)
        assert ms(SPEC, LookupLoad(0.0), "cuda") == 0.0
    assert not TTLookupCost.default("cpu").is_measured("cpu")


def test_precision_is_what_torch_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, load = TTSpec.suggest(10_000_000, 128, tt_ranks=32), LookupLoad(65_536)
    cost = TTLookupCost.default("cuda")
    fp32 = cost.forward_ms(spec, load, "cuda")
    monkeypatch.setattr("torchrec_flowtt.planner.lookup_cost.tf32_allowed", lambda: True)
    tf32 = cost.forward_ms(spec, load, "cuda")
    assert tf32 < fp32
    cost = TTLookupCost(calibration=cost.calibration, precision="fp32")
    assert cost.forward_ms(spec, load, "cuda") == fp32
