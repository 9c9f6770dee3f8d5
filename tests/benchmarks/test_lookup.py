from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--num-embeddings", "990", "--p-shapes", "9", "10", "11", "--batch-size", "32"]
RUN = ["--device", "cpu", "--repetitions", "2", "--index-sets", "2"]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark itself; its neighbours are imported as they are for the script."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("lookup")


def test_small_workloads_on_the_cpu_give_complete_records(tmp_path: Path) -> None:
    output = tmp_path / "lookup.json"
    workloads = ["W1:weighted=true", "W6p:tables=2,pooling=mean,index_dtype=int32"]
    result = subprocess.run(
        [sys.executable, "benchmarks/lookup.py", *RUN, *SMALL, "--pooling-factor", "3"]
        + ["--workloads", *workloads, "--output", str(output)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(output.read_text())
    assert report["commit"] and report["versions"]["torch"] and report["command"]
    assert report["refused"] == []
    assert [w["lookups"] for w in report["workloads"]] == [96, 192]
    assert [w["tt_ranks"] for w in report["workloads"]] == [[32, 32], [16, 16]]
    records = report["records"]
    contenders = ("flowtt", "fbgemm", "fbgemm_no_check")
    assert [(r["workload"], r["contender"], r["phase"]) for r in records] == [
        (workload["name"], contender, phase)
        for workload in report["workloads"]
        for contender in contenders
        for phase in ("forward", "training")
    ]
    for record in records:
        assert 0 < record["p10_us"] <= record["p50_us"] <= record["p90_us"]
        assert 0 < record["relative_error"] < 1e-5
        assert record["timing"] == "wall" and record["precision"] == "fp32"
        assert record["peak_bytes_above_parameters"] is None and record["floor_us"] is None
        assert record["ratio_to_fbgemm"] > 0
    assert all(contender in result.stdout for contender in contenders)


@pytest.mark.parametrize("wrong", ["output", "unwritten", "step"])
def test_a_wrong_contender_is_refused(
    wrong: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flowtt = sys.modules["lookup_contenders"].FlowTT
    lookup, parameters = flowtt.__call__, flowtt.parameters

    def wrong_output(self: object, batch: object) -> torch.Tensor:
        output = lookup(self, batch)
        return output + 1e-5 * output.detach().abs().max()

    def unwritten_output(self: object, batch: object) -> torch.Tensor:
        return torch.where(torch.arange(32).unsqueeze(1) == 31, torch.nan, lookup(self, batch))

    def last_slice_never_updated(self: object, batch: object) -> list[torch.Tensor]:
        cores = parameters(self, batch)
        cores[0][-1] = 1.0
        return cores

    if wrong == "step":
        monkeypatch.setattr(flowtt, "parameters", last_slice_never_updated)
    else:
        faulty = wrong_output if wrong == "output" else unwritten_output
        monkeypatch.setattr(flowtt, "__call__", faulty)
    output = tmp_path / "lookup.json"
    arguments = [*RUN, *SMALL, "--workloads", "W1", "--contenders", "flowtt/fp32"]
    assert module.main([*arguments, "--output", str(output)]) == 1
    report = json.loads(output.read_text())
    phase = "training" if wrong == "step" else "forward"
    assert f"{phase} has a relative error" in report["refused"][0]["wrong"]
    assert [r["phase"] for r in report["records"]] == (["forward"] if wrong == "step" else [])


def test_half_precision_cores_pass_their_checks(module: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "lookup.json"
    arguments = [*RUN, *SMALL, "--workloads", "W1", "--contenders", "flowtt", "--phases", "forward"]
    assert module.main([*arguments, "--output-dtype", "bfloat16", "--output", str(output)]) == 0
    records = json.loads(output.read_text())["records"]
    assert [r["precision"] for r in records] == ["fp32", "fp16", "bf16"]


def test_skewed_lookups_share_one_prefix(module: ModuleType) -> None:
    workload = module.WORKLOADS["W1-skew"]
    indices = module.draw_batch(workload, 3, torch.device("cpu")).indices
    assert indices.min() >= 0 and indices.max() < workload.num_embeddings
    _, counts = (indices // workload.spec.p_shapes[-1]).unique(return_counts=True)
    top, next_most = counts.topk(2).values.tolist()
    assert top / indices.numel() == pytest.approx(0.3, abs=0.01) and next_most < 20


def test_the_floor_counts_products_of_distinct_prefixes_and_bytes(module: ModuleType) -> None:
    floors = sys.modules["lookup_floor"]
    workload = module.WORKLOADS["W1"].variant(tables=2)
    spec = workload.spec
    every = module.Distinct((1000.0,) * 3, (100.0, 10.0, 20.0))
    flops = floors.chain_flops(spec, every)
    assert sum(flops) == 1000 * spec.flops_per_lookup
    rates = floors.Rates(write=1e12, copy=1e12, l2_read={0: 1e12}, mma={"fp32": 1e12})
    floor = floors.lookup_floor(workload, every, "fp32", 4, rates)
    assert floor.write_us == pytest.approx(2 * 65_536 * 128 * 4 / 1e6)
    assert floor.mma_us == pytest.approx(sum(flops) / 1e6)
    slices = [4 * 32 * 4, 32 * 4 * 32 * 4, 32 * 8 * 4]
    assert floor.l2_us == pytest.approx((100 * slices[0] + 10 * slices[1] + 20 * slices[2]) / 1e6)
    assert floor.forward_us == max(floor.write_us, floor.mma_us)


def test_workloads_and_contenders_are_named_or_refused(module: ModuleType) -> None:
    workload = module.parse_workload("W1:tt_ranks=64x16,weighted=true,alpha=1.2")
    assert (workload.tt_ranks, workload.weighted, workload.alpha) == ((64, 16), True, 1.2)
    assert workload.spec.p_shapes == (200, 220, 250)
    two_cores = module.parse_workload("W1:tt_ranks=32")
    assert two_cores.spec.num_cores == 2 and two_cores.spec.embedding_dim == 128
    with pytest.raises(ValueError, match="no workload 'W9'"):
        module.parse_workload("W9")
    with pytest.raises(ValueError, match="has no 'rank'"):
        module.parse_workload("W1:rank=3")
    with pytest.raises(ValueError, match="no contender 'flow'"):
        module.select_modes(["flow"])
