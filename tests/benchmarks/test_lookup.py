from __future__ import annotations

import importlib
import json
import math
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
SIZES = ("num-embeddings", "embedding-dim", "batch-size", "pooling-factor", "tables")
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
    records = json.loads(output.read_text())
    shapes = {record["workload"]: record["shape"] for record in records}
    assert [shape["lookups"] for shape in shapes.values()] == [96, 192]
    assert [shape["tt_ranks"] for shape in shapes.values()] == [[32, 32], [16, 16]]
    both = ("forward", "training")
    contenders = [("flowtt", "fp32", both), ("flowtt", "tf32", both)]
    contenders += [("flowtt", "bf16", both), ("flowtt_deterministic", "fp32", both)]
    contenders += [("flowtt_packed", precision, ("forward",)) for precision in ("fp32", "tf32")]
    others = ("adagrad", "row_wise_adagrad", "adam")
    contenders += [(f"flowtt_{other}", "tf32", ("training",)) for other in others]
    contenders += [("fbgemm", "fp32", both), ("fbgemm_no_check", "fp32", both)]
    contenders += [("fbgemm", "fp16", both)]
    contenders += [(f"fbgemm_{other}", "fp32", ("training",)) for other in others[:2]]
    contenders += [("fbgemm_adam", "fp32", (None,))]
    keys = ("workload", "contender", "precision", "phase")
    assert [tuple(record[key] for key in keys) for record in records] == [
        (workload, contender, precision, phase)
        for workload in shapes
        for contender, precision, phases in contenders
        for phase in phases
    ]
    limits = {"fp32": 1e-5, "tf32": 1e-3, "fp16": 1e-2, "bf16": 1e-2}
    absent = [record for record in records if record["contender"] == "fbgemm_adam"]
    assert {record["failure"] for record in absent} == {"FBGEMM has no Adam on the CPU"}
    for record in records:
        run = record["run"]
        assert run["commit"] and run["versions"]["torch"] and run["command"]
        if record in absent:
            continue
        assert 0 < record["p10_us"] <= record["p50_us"] <= record["p90_us"]
        assert 0 <= record["relative_error"] < limits[record["precision"]]
        assert record["timing"] == "wall" and record["failure"] is None
        assert record["peak_bytes_above_parameters"] is None and record["floor_us"] is None
        if record["optimizer"] == "exact_sgd":
            assert record["ratio_to_fbgemm"] > 0 and record["ratio_to_fbgemm_no_check"] > 0
            assert record["ratio_to_sgd"] is None
        else:
            assert record["ratio_to_sgd"] > 0 and record["ratio_to_fbgemm_no_check"] is None
    assert all(contender in result.stdout for contender, _, _ in contenders)


def test_phases_that_no_contender_has(
    module: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*RUN, *SMALL, "--workloads", "W1", "--contenders", "flowtt_packed"]
    assert module.main([*arguments, "--phases", "training"]) == 0
    assert "nothing to measure, no contender has these phases" in capsys.readouterr().out


def test_what_failed_says_why(module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*RUN, *SMALL, "--workloads", "W1", "--contenders", "fbgemm_adam"]
    assert module.main(arguments) == 0
    assert "fbgemm_adam fp32 failed: FBGEMM has no Adam on the CPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "message"),
    [
        *((f"--{name} 0", f"{name.replace('-', '_')} must be at least 1, got 0") for name in SIZES),
        ("--tt-ranks 0 4", r"tt_ranks\[0\] must be positive"),
        ("--p-shapes 0 1 2", r"p_shapes\[0\] must be positive"),
        ("--alpha nan", "alpha must be finite"),
        ("--prefix-share 2", "prefix_share must be 0 to 1"),
        ("--pooling max", "pooling must be one of sum, mean, got max"),
        ("--index-dtype int7", "index_dtype must be one of int64, int32"),
        ("--output-dtype float", "output_dtype must be one of float32"),
    ],
)
def test_shapes_that_do_not_exist(option: str, message: str, module: ModuleType) -> None:
    arguments = [*RUN, *SMALL, "--workloads", "W1", *option.split()]
    with pytest.raises(SystemExit, match=f"workload W1: .*{message}"):
        module.main(arguments)
    sweep = importlib.import_module("lookup_sweep")
    with pytest.raises(SystemExit, match="workload W1: batch_size must be at least 1"):
        sweep.main([*RUN, "--batch-sizes", "0"])


def test_ratios_to_what_a_record_is_compared_with(module: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "lookup.json"
    arguments = ["--workloads", "W1", "W1-skew", "--contenders", "flowtt/fp32", "flowtt/tf32"]
    assert module.main([*RUN, *SMALL, *arguments, "--output", str(output)]) == 0
    records = json.loads(output.read_text())
    medians = {(r["workload"], r["precision"], r["phase"]): r["p50_us"] for r in records}
    (uniform, skewed) = dict.fromkeys(record["workload"] for record in records)
    for record in records:
        name, precision, phase = (record[key] for key in ("workload", "precision", "phase"))
        to_uniform = medians[skewed, precision, phase] / medians[uniform, precision, phase]
        assert record["ratio_to_uniform"] == (
            None if name == uniform else pytest.approx(to_uniform, abs=1e-3)
        )
        tf32 = medians.get((name, "tf32", phase))
        expected = None if tf32 is None else pytest.approx(record["p50_us"] / tf32, abs=1e-3)
        assert record["ratio_to_tf32"] == expected
    records_module = sys.modules["lookup_records"]
    renamed = [{**record, "workload": "W1", "p50_us": 125.0} for record in records]
    records_module.add_ratios(renamed)
    faster = {(r["phase"], r["times_faster_than_ecorec"]) for r in renamed}
    assert faster == {("forward", 10.0), ("training", 27.6)}
    for record in renamed:
        record["p50_us"] = 7000.0
    records_module.add_ratios(renamed)  # slower: the digits are behind the point
    assert {r["times_faster_than_ecorec"] for r in renamed} == {0.179, 0.493}


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
    *measured, refused = json.loads(output.read_text())
    phase = "training" if wrong == "step" else "forward"
    assert f"wrong: flowtt/fp32 on {refused['workload']}: {phase} has a rel" in refused["failure"]
    assert refused["p50_us"] is None and refused["ratio_to_floor"] is None
    assert [r["phase"] for r in measured] == (["forward"] if wrong == "step" else [])


def test_a_deterministic_contender_that_varies_is_refused(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flowtt = sys.modules["lookup_contenders"].FlowTT
    lookup = flowtt.__call__
    monkeypatch.setattr(
        flowtt, "__call__", lambda self, batch: lookup(self, batch) * (1 + 1e-7 * torch.rand(1))
    )
    output = tmp_path / "lookup.json"
    arguments = [*RUN, *SMALL, "--workloads", "W1", "--contenders", "flowtt_deterministic"]
    assert module.main([*arguments, "--output", str(output)]) == 1
    (refused,) = json.loads(output.read_text())
    assert refused["failure"].endswith("forward differs from run to run")


def test_half_precision_cores_pass_their_checks(module: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "lookup.json"
    arguments = [*RUN, *SMALL, "--workloads", "W1", "--contenders", "flowtt", "--phases", "forward"]
    assert module.main([*arguments, "--output-dtype", "bfloat16", "--output", str(output)]) == 0
    records = json.loads(output.read_text())
    assert [r["precision"] for r in records] == ["fp32", "tf32", "fp16", "bf16"]


def test_skewed_lookups_share_one_prefix(module: ModuleType) -> None:
    workload = module.WORKLOADS["W1-skew"]
    draw_batch = sys.modules["lookup_workloads"].draw_batch
    indices = draw_batch(workload, 3, torch.device("cpu")).indices
    assert indices.min() >= 0 and indices.max() < workload.num_embeddings
    _, counts = (indices // workload.spec.p_shapes[-1]).unique(return_counts=True)
    top, next_most = counts.topk(2).values.tolist()
    assert top / indices.numel() == pytest.approx(0.3, abs=0.01) and next_most < 20


def test_the_floor_counts_products_of_distinct_prefixes_and_bytes(module: ModuleType) -> None:
    floors, workloads = sys.modules["lookup_floor"], sys.modules["lookup_workloads"]
    workload = module.WORKLOADS["W1"].variant(tables=2)
    spec = workload.spec
    spans = {(a, b): 1000.0 for a in range(3) for b in range(a + 1, 3)}
    slices = (100.0, 10.0, 20.0)
    every = workloads.Distinct({**spans, **{(k, k): slices[k] for k in range(3)}})
    assert every.prefixes == [100.0, 1000.0, 1000.0] and every.slices == list(slices)
    flops, last = floors.chain_flops(spec, every)
    assert flops == 1000 * spec.flops_per_lookup and last == 1000 * 2 * 16 * 32 * 8
    rates = floors.Rates(
        write=1e12, copy=1e12, l2_read={0: 1e12}, l2_bytes=10**5, mma={"fp32": 1e12}
    )
    floor = floors.lookup_floor(workload, every, "fp32", 4, rates)
    slices = [4 * 32 * 4, 32 * 4 * 32 * 4, 32 * 8 * 4]
    touched = 100 * slices[0] + 10 * slices[1] + 20 * slices[2]
    assert floor.l2_us == pytest.approx(touched / 1e6)
    written = 2 * 65_536 * 128 * 4
    assert floor.memory_us == pytest.approx((written + touched - 10**5) / 1e6)
    assert floor.mma_us == pytest.approx(flops / 1e6)
    assert floor.forward_us == max(floor.memory_us, floor.mma_us) and floor.bound == "memory"


@pytest.mark.parametrize("ranks", ["32", "16x16x16"])
def test_the_floor_of_two_and_four_cores(ranks: str, module: ModuleType) -> None:
    floors, workloads = sys.modules["lookup_floor"], sys.modules["lookup_workloads"]
    workload = sys.modules["lookup_options"].parse_workload(
        f"W1:num_embeddings=5000,batch_size=500,tt_ranks={ranks}"
    )
    batch = workloads.draw_batch(workload, 0, torch.device("cpu"))
    distinct = workloads.count_distinct(workload, [batch])
    p, ids = workload.spec.p_shapes, batch.indices
    tails = [math.prod(p[k:]) for k in range(1, len(p) + 1)]
    expected = [len((ids // tail).unique()) for tail in tails]
    assert distinct.prefixes == expected
    assert distinct.slices == [
        len((ids // tail % factor).unique()) for tail, factor in zip(tails, p, strict=True)
    ]
    rates = floors.RATES["NVIDIA H200"]
    floor = floors.lookup_floor(workload, distinct, "tf32", 4, rates)
    assert 0 < floor.mma_us <= floor.forward_us <= floor.training_us
    flops, last = floors.chain_flops(workload.spec, distinct)
    left_to_right, columns = 0.0, 1
    for count, (_, rank, q, next_rank) in zip(expected, workload.spec.core_shapes, strict=True):
        left_to_right += 2 * count * columns * rank * q * next_rank * (columns > 1)
        columns *= q
    # Two products of two cores each are cheaper than three from left to right.
    assert last <= flops < left_to_right if len(p) == 4 else flops == left_to_right


def test_workloads_and_contenders_are_named_or_refused(module: ModuleType) -> None:
    parse_workload = sys.modules["lookup_options"].parse_workload
    workload = parse_workload("W1:tt_ranks=64x16,weighted=true,alpha=1.2")
    assert (workload.tt_ranks, workload.weighted, workload.alpha) == ((64, 16), True, 1.2)
    assert workload.spec.p_shapes == (200, 220, 250)
    two_cores = parse_workload("W1:tt_ranks=32")
    assert two_cores.spec.num_cores == 2 and two_cores.spec.embedding_dim == 128
    with pytest.raises(ValueError, match="no workload 'W9'"):
        parse_workload("W9")
    with pytest.raises(ValueError, match="has no 'rank'"):
        parse_workload("W1:rank=3")
    with pytest.raises(ValueError, match="no contender 'flow'"):
        module.select_modes(["flow"])
