from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOOR = {"bound": "mma", "memory_us": 1.0, "mma_us": 2.0, "l2_us": 0.5}
SHAPE = {
    "tables": 1,
    "num_embeddings": 1000,
    "embedding_dim": 16,
    "p_shapes": [10, 10, 10],
    "q_shapes": [2, 2, 4],
    "tt_ranks": [8, 8],
    "batch_size": 64,
    "pooling_factor": 1,
    "alpha": 1.05,
    "prefix_share": 0.3,
    "distinct_rows": 60,
    "distinct_prefixes": 40,
}
RUN = {
    "card": "a card",
    "cpu": "a processor",
    "driver": "1.2",
    "cuda": "13.0",
    "versions": {"torch": "2.11"},
    "commit": "0123456789abcdef",
    "date": "2026-11-29T00:00:00+00:00",
    "command": "python benchmarks/lookup.py",
    "smallest_kernel_us": {"graph": 3.0},
}


def record(contender: str, precision: str, p50_us: float, **changes: Any) -> dict[str, Any]:
    compressed = contender.startswith("flowtt")
    return {
        "workload": "W1",
        "contender": contender,
        "precision": precision,
        "phase": "forward",
        "timing": "graph",
        "cold": False,
        "p50_us": p50_us,
        "relative_error": 1e-7,
        "peak_bytes_above_parameters": 2**21,
        "floor": FLOOR if compressed else None,
        "floor_us": 2.0 if compressed else None,
        "ratio_to_floor": p50_us / 2 if compressed else None,
        "ratio_to_fbgemm": p50_us / 40,
        "failure": None,
        "shape": SHAPE,
        "run": RUN,
        **changes,
    }


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("performance_tables")


def cells(markdown: str) -> list[list[str]]:
    lines = [line for line in markdown.splitlines() if not line.startswith("|:")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_tables_leave_out_what_was_not_measured(tables: ModuleType) -> None:
    records = [record("flowtt", "fp32", 10.0), record("fbgemm", "fp32", 40.0)]
    records.append(record("flowtt", "tf32", 1.0, failure="wrong: all of it"))
    assert cells(tables.times_table(records)) == [["us", "fp32", "FBGEMM"], ["W1", "10.0", "40.0"]]
    assert cells(tables.ratios_table(records)) == [["workload", "fp32 / FBGEMM"], ["W1", "0.25"]]
    assert cells(tables.times_table(records, timing="chain"))[0] == ["us"]


def test_sweeps_are_in_order_and_name_the_bound(tables: ModuleType) -> None:
    records = [
        record("flowtt", "fp32", 10.0 * size, workload=f"W1:batch_size={size}", sweeps={"batch": n})
        for n, size in ((2048, 2), (256, 1))
    ]
    header, *rows = cells(tables.sweep_table(records, "batch", "bags"))
    assert [row[0] for row in rows] == ["256", "2,048"]
    assert rows[0][header.index("fp32 bound by")] == "mma"


def test_ablations_have_the_ratio_beside_the_time(tables: ModuleType) -> None:
    variants = {"none": 1.0, "sharing": 1.5, "all": 4.0}
    records = [
        record("flowtt", "tf32", 10.0 * ratio, disabled=name, ratio_to_all_on=ratio)
        for name, ratio in variants.items()
    ]
    assert cells(tables.ablation_table(records)) == [
        ["us", "everything on", "no sharing", "all off"],
        ["W1", "10.0", "15.0 (1.50)", "40.0 (4.00)"],
    ]


def test_the_page_and_its_plots_are_the_same_for_the_same_records(
    tables: ModuleType, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    report = importlib.import_module("performance_report")
    lookup = [record("flowtt", "fp32", 10.0), record("flowtt", "tf32", 5.0)]
    other_run = {**RUN, "commit": "fedcba9876543210", "command": "python another.py"}
    lookup.append(record("fbgemm", "fp32", 40.0, phase="training", run=other_run))
    sweep = [
        record("flowtt", "fp32", float(n), workload=f"W1:batch_size={n}", sweeps={"batch": n})
        for n in (256, 1024)
    ]
    ablation = [
        record("flowtt", "tf32", 5.0 * ratio, disabled=name, ratio_to_all_on=ratio)
        for name, ratio in (("none", 1.0), ("folding", 1.25))
    ]
    folder = tmp_path / "card"
    folder.mkdir()
    for name, records in {"lookup": lookup, "sweep": sweep, "ablation": ablation}.items():
        (folder / f"{name}.json").write_text(json.dumps(records))
    written = []
    for _ in range(2):
        page = report.write_report(folder).read_text()
        plots = {path.name: path.read_text() for path in sorted(folder.glob("*.svg"))}
        written.append((page, plots))
    assert written[0] == written[1]
    assert set(plots) == {"workloads.svg", "batch.svg", "floor.svg", "ablation.svg"}
    assert all(f"card/{name}" in page for name in plots)
    assert "a card; driver 1.2" in page and "6.2 (1.25)" in page
    for phase, commit in (("forward", "0123456789ab"), ("training", "fedcba987654")):
        assert f"[lookup.json](card/lookup.json), {phase}: a card; driver 1.2" in page
        assert f"commit {commit}; 2026-11-29" in page
    # What was not measured has no heading over an empty table.
    assert "Cold" not in page and "Eight forwards" not in page
    assert not re.search(r"^\|:?-+:?\|\n\n", page, re.MULTILINE)
    with pytest.raises(ValueError, match="no records"):
        report.write_report(tmp_path)
