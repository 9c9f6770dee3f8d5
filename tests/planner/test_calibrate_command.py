"""`flowtt calibrate`, with few and small lookups on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from torchrec_flowtt.cli.main import flowtt
from torchrec_flowtt.planner import Calibration, LookupLoad, TTLookupCost, calibrate
from torchrec_flowtt.planner.lookup_measurement import Lookups, Plan
from torchrec_flowtt.shapes import TTSpec

PLAN = Plan(
    num_embeddings=20_000,
    pooling_factor=4,
    zipf_exponent=1.05,
    precisions=("fp32",),
    grids={2: ((4,), (16,), (2_048, 8_192)), 3: ((4, 8), (16, 32), (2_048, 8_192))},
)


def test_it_measures_and_writes_what_a_cost_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "CPU_PLAN", PLAN)
    output, kept = tmp_path / "here.json", tmp_path / "times.json"
    arguments = [f"--output={output}", f"--measurements={kept}", "--check=2", "--device=cpu"]
    result = CliRunner().invoke(flowtt, ["calibrate", *arguments])
    assert result.exit_code == 0, result.output
    assert result.output.count("predicted") == 2 * 2
    assert "of 2 within 30%" in result.output

    calibration = Calibration.load(output)
    assert calibration.device == "cpu" and calibration.run["torch"] == torch.__version__
    spec = TTSpec.suggest(20_000, 32, tt_ranks=8)
    cost = TTLookupCost(calibration=calibration)
    for ms in (cost.forward_ms, cost.backward_ms):
        assert 0 < ms(spec, LookupLoad(5e3, pooling_factor=2.0), "cpu") < float("inf")

    # The measurements are read again, and give the same.
    again = tmp_path / "again.json"
    arguments[0] = f"--output={again}"
    monkeypatch.setattr(calibrate, "measure", None)
    assert (
        CliRunner()
        .invoke(flowtt, ["calibrate", *arguments])
        .output.endswith(result.output.split("\n", 1)[1])
    )
    assert again.read_text() == output.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output=nowhere/here.json"], "no folder nowhere"),
        (["--measurements=nowhere/times.json"], "no folder nowhere"),
        (["--measurements=times.json"], "times.json has no measurements: card: "),
        (["--check=-1"], "--check"),
        (["--device=tpu"], "--device"),
    ],
)
def test_wrong_arguments(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("times.json").write_text("{}")
    result = CliRunner().invoke(flowtt, ["calibrate", *arguments])
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path: Path) -> None:
    arguments = ["calibrate", "--device=cuda", f"--output={tmp_path / 'here.json'}"]
    result = CliRunner().invoke(flowtt, arguments)
    assert result.exit_code == 2 and "needs a GPU" in result.output


def test_ids_are_in_range_and_skewed_ones_repeat() -> None:
    lookups = Lookups(1_000_000, 1.05, torch.device("cpu"))
    uniform, zipf = lookups.draw(10_000, "uniform"), lookups.draw(10_000, "zipf")
    for ids in (uniform, zipf):
        assert ids.dtype == torch.int64 and 0 <= ids.min() and ids.max() < 1_000_000
    assert zipf.unique().numel() < 0.8 * uniform.unique().numel()
    assert lookups.draw(10_000, "zipf") is zipf
