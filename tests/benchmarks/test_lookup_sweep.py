from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RUN = ["--device", "cpu", "--repetitions", "2", "--index-sets", "2"]
SMALL = "W1:num_embeddings=990,batch_size=32"


@pytest.fixture(autouse=True)
def _neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools import one another as they do when run as scripts."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def sweep() -> ModuleType:
    return importlib.import_module("lookup_sweep")


@pytest.fixture
def ablation() -> ModuleType:
    return importlib.import_module("lookup_ablation")


def test_every_point_of_every_sweep_is_measured(sweep: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "sweep.json"
    axes = ["--ranks", "4", "32", "--columns", "16", "128", "--cores", "2", "3", "4"]
    arguments = [*RUN, "--workload", SMALL, *axes, "--batch-sizes", "8", "32"]
    assert sweep.main([*arguments, "--output", str(output)]) == 0
    records = json.loads(output.read_text())
    points = {record["workload"]: (record["sweeps"], record["shape"]) for record in records}
    assert [sweeps for sweeps, _ in points.values()] == [
        {"ranks": 4},
        {"ranks": 32, "columns": 128, "cores": 3, "batch": 32},
        {"columns": 16},
        {"cores": 2},
        {"cores": 4},
        {"batch": 8},
    ]
    for sweeps, shape in points.values():
        assert len(shape["p_shapes"]) == sweeps.get("cores", 3) == len(shape["tt_ranks"]) + 1
        assert shape["embedding_dim"] == sweeps.get("columns", 128)
        assert shape["batch_size"] == sweeps.get("batch", 32)
    with_fbgemm = {r["workload"] for r in records if r["contender"] == "fbgemm"}
    assert {frozenset(points[name][0]) for name in with_fbgemm} == {
        frozenset({"ranks", "columns", "cores", "batch"}),
        frozenset({"columns"}),
        frozenset({"batch"}),
    }
    assert {r["phase"] for r in records} == {"forward", "training"}
    assert {r["precision"] for r in records if r["contender"] == "flowtt"} == {
        "fp32",
        "tf32",
        "bf16",
    }


def test_the_published_sweeps_reach_their_ends(sweep: ModuleType) -> None:
    options = sweep.parse_arguments([])
    assert {8, 32, 128} <= set(options.ranks) and options.cores == [2, 3, 4]
    assert min(options.columns) == 16 and max(options.columns) == 256
    assert options.batch_sizes[0] == 256 and options.batch_sizes[-1] == 1_048_576
    points = sweep.sweep_points(options.workload, options)
    for workload in points:
        workload.spec  # noqa: B018  (a shape that cannot be built raises here)


def test_every_mechanism_is_switched_off_alone_and_together(
    ablation: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()
    modes = importlib.import_module("lookup_modes")
    contenders = importlib.import_module("lookup_contenders")
    lookup = contenders.FlowTT.__call__

    def noticing(self: object, batch: object) -> torch.Tensor:
        seen.add(modes.os.environ[modes.DISABLE_VARIABLE])
        return lookup(self, batch)

    monkeypatch.delenv(modes.DISABLE_VARIABLE, raising=False)
    monkeypatch.setattr(contenders.FlowTT, "__call__", noticing)
    output = tmp_path / "ablation.json"
    assert ablation.main([*RUN, "--workloads", SMALL, "--output", str(output)]) == 0
    records = json.loads(output.read_text())
    variants = ["none", *modes.MECHANISMS, "all"]
    assert [(r["precision"], r["disabled"]) for r in records] == [
        (precision, variant) for precision in ("tf32", "fp32") for variant in variants
    ]
    assert seen == {"", *modes.MECHANISMS, ",".join(modes.MECHANISMS)}
    assert modes.DISABLE_VARIABLE not in modes.os.environ
    base = {r["precision"]: r["p50_us"] for r in records if r["disabled"] == "none"}
    for record in records:
        ratio = record["p50_us"] / base[record["precision"]]
        assert record["ratio_to_all_on"] == pytest.approx(ratio, abs=1e-3)
