from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from torchrec_flowtt.planner.calibrate import fitted, read_measurements
from torchrec_flowtt.planner.calibration import (
    Calibration,
    Coefficients,
    Measurement,
    packaged_calibrations,
)
from torchrec_flowtt.planner.coefficient_fit import fit
from torchrec_flowtt.planner.kernel_families import lookup_work
from torchrec_flowtt.shapes import TTSpec

MEASUREMENTS = Path(__file__).parents[2] / "docs/performance/h200/lookup_times.json"
SPEC = TTSpec.suggest(1_000_000, 64, tt_ranks=32)


def coefficients(**values: object) -> Coefficients:
    chosen = {
        "family": "tiled",
        "calls": "large",
        "precision": "fp32",
        "bags": "single",
        "ids": "zipf",
        "phase": "forward",
        "fixed": 10.0,
        "lookup": 1e-3,
        "column": 0.0,
        "flop": 0.0,
        "parameter": 0.0,
        "error": 0.0,
        "points": 1,
        **values,
    }
    return Coefficients(**chosen)


def calibration(*found: Coefficients) -> Calibration:
    phases = {c.phase for c in found}
    if phases == {"forward"}:
        found = (*found, found[0].model_copy(update={"phase": "backward"}))
    return Calibration(
        card="a card",
        device="cuda",
        pooling_factor=20,
        optimizer="exact_sgd",
        run={},
        coefficients=found,
    )


def measured(spec: TTSpec, lookups: int, forward_us: float, backward_us: float) -> Measurement:
    return Measurement(
        num_embeddings=spec.num_embeddings,
        embedding_dim=spec.embedding_dim,
        p_shapes=spec.p_shapes,
        q_shapes=spec.q_shapes,
        tt_ranks=spec.tt_ranks,
        lookups=lookups,
        pooling_factor=1,
        ids="uniform",
        precision="tf32",
        forward_us=forward_us,
        backward_us=backward_us,
    )


def test_the_fit_finds_the_coefficients_that_made_the_times() -> None:
    points = []
    for dim, rank, lookups in itertools.product((32, 64, 128), (8, 32), (8_192, 65_536, 524_288)):
        spec = TTSpec.suggest(1_000_000, dim, tt_ranks=rank)
        work = lookup_work(spec, "cuda")
        assert work.family == "tiled"
        forward = 12.0 + lookups * (2e-4 + 3e-6 * work.columns + 4e-9 * work.flops)
        backward = 30.0 + lookups * 5e-9 * work.flops + 6e-6 * spec.num_parameters
        points.append(measured(spec, lookups, forward, backward))
    forward, backward = fit(points, "cuda")
    assert (forward.phase, backward.phase) == ("forward", "backward")
    assert (forward.family, forward.precision, forward.bags) == ("tiled", "tf32", "single")
    assert forward.points == len(points) and forward.error == 0.0
    found = (forward.fixed, forward.lookup, forward.column, forward.flop, forward.parameter)
    assert found == pytest.approx((12.0, 2e-4, 3e-6, 4e-9, 0.0), rel=1e-3)
    found = (backward.fixed, backward.lookup, backward.column, backward.flop, backward.parameter)
    assert found == pytest.approx((30.0, 0.0, 0.0, 5e-9, 6e-6), rel=1e-3)


def test_coefficients_are_never_negative() -> None:
    points = [measured(SPEC, n, us, us) for n, us in ((8_192, 50.0), (65_536, 30.0))]
    for found in fit(points, "cuda"):
        values = (found.fixed, found.lookup, found.column, found.flop, found.parameter)
        assert all(value >= 0 for value in values) and any(values)
        assert found.error > 0.1


def test_small_calls_of_one_size_cost_the_same_whatever_their_size() -> None:
    forward, _ = fit([measured(SPEC, 1_024, 9.0, 30.0)], "cuda")
    assert forward.calls == "small"
    assert (forward.lookup, forward.column) == (0.0, 0.0)


def test_tables_share_what_a_call_costs() -> None:
    found = calibration(coefficients())
    alone = found.us(SPEC, 10_000, phase="forward")
    assert alone == pytest.approx(10.0 + 10.0)
    together = found.us(SPEC, 10_000, phase="forward", call_lookups=40_000)
    assert together == pytest.approx(10.0 / 4 + 10.0)


def test_pooling_factors_between_those_measured() -> None:
    pooled = coefficients(bags="pooled", fixed=40.0, lookup=4e-3)
    found = calibration(coefficients(), pooled)

    def us(pooling_factor: float) -> float:
        return found.us(SPEC, 10_000, phase="forward", pooling_factor=pooling_factor)

    assert us(0.5) == us(1.0) == pytest.approx(20.0)
    assert us(20.0) == us(100.0) == pytest.approx(80.0)
    assert us(20.0**0.5) == pytest.approx(40.0)


def test_the_kind_that_is_most_alike_is_taken() -> None:
    general = coefficients(family="general", fixed=100.0, lookup=0.0)
    small = coefficients(calls="small", fixed=5.0, lookup=0.0)
    backward = coefficients(phase="backward", fixed=1.0, lookup=0.0)
    found = calibration(coefficients(), general, small, backward)
    wide = TTSpec.suggest(1_000_000, 64, tt_ranks=64)
    assert found.us(wide, 10_000, phase="forward") == pytest.approx(100.0)
    assert found.us(SPEC, 100, phase="forward") == pytest.approx(5.0)
    assert found.us(SPEC, 10_000, phase="backward") == pytest.approx(1.0)
    assert found.us(SPEC, 10_000, phase="forward", precision="tf32") == pytest.approx(20.0)


def test_what_comes_with_the_package_is_fitted_to_the_measurements_that_are_kept() -> None:
    found = packaged_calibrations()["NVIDIA H200"]
    assert found == fitted(read_measurements(MEASUREMENTS))
    kinds = {(c.family, c.precision, c.bags, c.ids, c.phase) for c in found.coefficients}
    families = ("tiled", "wide", "tiled_pairs", "wide_pairs", "two_core", "general")
    assert kinds == set(
        itertools.product(
            families,
            ("fp32", "tf32"),
            ("single", "pooled"),
            ("uniform", "zipf"),
            ("forward", "backward"),
        )
    )


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"fixed":2.876', '"fixed":-1', "coefficients: 0: fixed: "),
        ('"fixed":2.876', '"fixed":Infinity', "coefficients: 0: fixed: "),
        ('"fixed":2.876', '"fixed":NaN', "coefficients: 0: fixed: "),
        ('"family":"two_core"', '"family":"nonsense"', "coefficients: 0: family: "),
        ('"phase":"backward"', '"phase":"forward"', "both phases, got only {'forward'}"),
        ('"fbgemm_bytes_per_ms":1', '"fbgemm_bytes_per_ms":-1', "fbgemm_bytes_per_ms: "),
        ('"pooling_factor":20', '"pooling_factor":1', "pooling_factor: "),
        ("{", "", "no calibration: Invalid JSON"),
    ],
)
def test_values_that_no_calibration_has(
    before: str, after: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    packaged_calibrations()["NVIDIA H200"].save(path)
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(ValueError, match=re.escape(message)):
        Calibration.load(path)


def test_files_that_are_no_calibration(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    packaged_calibrations()["NVIDIA H200"].save(path)
    assert Calibration.load(path) == packaged_calibrations()["NVIDIA H200"]
    path.write_text("{}")
    with pytest.raises(ValueError, match="calibration.json is no calibration: card: "):
        Calibration.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="calibration.json is no calibration"):
        Calibration.load(path)
