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
    "p_shapes": [10, 10, 11],
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
    lines = [line for line in markdown.splitlines() if re.match(r"\|[^:]", line)]
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


def test_sweeps_show_the_factors_that_they_change(tables: ModuleType) -> None:
    records = [
        record(contender, "fp32", 10.0, sweeps={"columns": 16 * n}, shape=shape)
        for n in (1, 2)
        for shape in [{**SHAPE, "q_shapes": [2, 2, 4 * n]}]
        for contender in ("flowtt", "fbgemm")
    ]
    # An uncompressed table has columns and no factors.
    records[-1]["shape"] = {**SHAPE, "p_shapes": [1000]}
    assert tables.common_factors(records, "columns") == ["p = 10 x 10 x 11"]
    header, *rows = cells(tables.sweep_table(records, "columns", "columns D"))
    assert header[:2] == ["columns D", "q"] and "p" not in header
    assert [row[:2] for row in rows] == [["16", "2 x 2 x 4"], ["32", "2 x 2 x 8"]]
    del records[2:]
    assert tables.common_factors(records, "columns") == ["p = 10 x 10 x 11", "q = 2 x 2 x 4"]
    assert not {"p", "q"} & set(cells(tables.sweep_table(records, "columns", "columns D"))[0])


def test_training_is_compared_with_ecorec(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = {"W1": {"forward": 1.0, "training": 2000.0}, "W2p": {"training": 2000.0}}
    monkeypatch.setattr(tables, "ECOREC_US", peers)
    times = {"W1": 4500.0, "W2p": 1000.0, "serving": 50.0}
    records = [record("flowtt", "fp32", time, workload=name) for name, time in times.items()]
    assert cells(tables.training_table(records)) == [
        ["us", "fp32", "EcoRec", "fp32 / EcoRec"],
        ["W1", "4,500", "2,000", "2.25"],
        ["W2p", "1,000", "2,000", "0.50"],
        ["serving", "50.0", "–", "–"],
    ]
    assert tables.slower_than_ecorec(records, "fp32") == ["W1"]
    assert tables.slower_than_ecorec(records, "bf16") == []


def test_optimizers_are_compared_with_sgd_and_with_fbgemm(tables: ModuleType) -> None:
    optimizers_table = importlib.import_module("performance_optimizers").optimizers_table
    sgd = [record("flowtt", "tf32", 100.0), record("fbgemm", "fp32", 50.0, ratio_to_fbgemm=1.0)]
    assert optimizers_table(sgd) == ""
    others = [
        record("flowtt_adam", "tf32", 130.0, ratio_to_sgd=1.3, ratio_to_fbgemm=2.0),
        record("flowtt_adam", "fp32", 230.0, ratio_to_sgd=1.1, ratio_to_fbgemm=3.0),
        record("flowtt_row_wise_adagrad", "tf32", 1100.0, ratio_to_sgd=11.0, ratio_to_fbgemm=None),
        record("flowtt_adagrad", "tf32", 1.0, failure="wrong: all of it"),
        record("fbgemm_adam", "fp32", 65.0, ratio_to_sgd=1.3, ratio_to_fbgemm=1.0),
        # Tables of which only SGD was measured are in another table.
        record("flowtt", "tf32", 10.0, workload="W2p"),
    ]
    text = optimizers_table([*sgd, *others])
    header = ["us", "SGD", "row-wise Adagrad", "Adam", "FBGEMM, SGD", "FBGEMM, Adam"]
    header += ["SGD / FBGEMM", "Adam / FBGEMM"]
    row = ["W1", "100.0", "1,100 (11.00)", "130.0 (1.30)", "50.0", "65.0 (1.30)", "2.50", "2.00"]
    assert cells(text) == [header, row]
    assert text.splitlines()[-1].startswith("Measured: a card")


ALIKE = "Measured: a card, driver 1.2, CUDA 13.0; torch 2.11; "
NEWER = {**RUN, "commit": "fedcba9876543210-dirty", "date": "2026-12-01T00:00:00+00:00"}
OLD, NEW = "commit 0123456789ab", "commit fedcba987654-dirty"


@pytest.mark.parametrize(
    ("newer", "said"),
    [
        ("", f"{ALIKE}{OLD}."),
        ("W1 fp32, W1 FBGEMM", f"{ALIKE}{NEW}: *W1*; {OLD}: the rest."),
        ("W1 fp32, W2p fp32, W3p fp32", f"{ALIKE}{OLD}: *FBGEMM*; {NEW}: the rest."),
        ("W2p fp32", f"{ALIKE}{NEW}: *W2p* (*fp32*); {OLD}: the rest."),
        (
            "W1 fp32, W1 FBGEMM, W2p FBGEMM",
            f"{ALIKE}{OLD}: *W2p* (*fp32*), *W3p*; {NEW}: the rest.",
        ),
    ],
)
def test_a_table_says_which_cells_come_from_which_commit(
    newer: str, said: str, tables: ModuleType
) -> None:
    records = [
        record(contender, "fp32", 10.0, workload=name, run=NEWER if cell in newer else RUN)
        for name in ("W1", "W2p", "W3p")
        for contender, column in (("flowtt", "fp32"), ("fbgemm", "FBGEMM"))
        for cell in [f"{name} {column}"]
    ]
    # What the table does not show is not spoken of.
    records.append(record("flowtt", "fp32", 1.0, timing="chain", run={**RUN, "card": "another"}))
    text = tables.times_table(records, timing="graph")
    assert said in text.splitlines()


def test_tables_of_several_cards_and_versions_name_them(tables: ModuleType) -> None:
    other = {**RUN, "card": "another", "versions": {"torch": "2.12"}}
    records = [record("flowtt", "fp32", 10.0, workload=name) for name in ("W1", "W2p", "serving")]
    records[1]["run"] = other
    said = (
        f"Measured: {OLD}; another, driver 1.2, CUDA 13.0, torch 2.12: *W2p*; "
        "a card, driver 1.2, CUDA 13.0, torch 2.11: the rest."
    )
    for table in (tables.times_table, tables.errors_table, tables.shapes_table):
        assert table(records).splitlines()[-1] == said
    rows = said.replace("*W2p*", "*W2p, fp32*")
    assert tables.floors_table(records).splitlines()[-1] == rows
    for place, entry in enumerate(records):
        entry.update(sweeps={"batch": place}, disabled="none", ratio_to_all_on=1.0)
    assert tables.ablation_table(records).splitlines()[-1] == said
    swept = tables.sweep_table(records, "batch", "bags").splitlines()[-1]
    assert swept == said.replace("*W2p*", "*1*")


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
    lookup.append(record("flowtt", "fp32", 1e6, phase="training", run=other_run))
    training = {"phase": "training", "run": other_run}
    lookup.append(record("flowtt_adam", "tf32", 130.0, ratio_to_sgd=1.3, **training))
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
    assert "a card, driver 1.2" in page and "6.2 (1.25)" in page
    assert "### Optimizers" in page and "130.0 (1.30)" in page
    assert "W1 with other values; p = 10 x 10 x 11, q = 2 x 2 x 4 in every row; a forward" in page
    # Every table has its line, and a sentence on EcoRec stands where there is one to compare with.
    assert page.count("\nMeasured: a card") == len(re.findall(r"^\|:?-+", page, re.MULTILINE))
    assert "takes longer than EcoRec on W1:" in page
    for phase, commit in (("forward", "0123456789ab"), ("training", "fedcba987654")):
        assert f"[lookup.json](card/lookup.json), {phase}: a card, driver 1.2" in page
        assert f"commit {commit}; 2026-11-29" in page
    # What was not measured has no heading over an empty table.
    assert "Cold" not in page and "Eight forwards" not in page
    assert not re.search(r"^\|:?-+:?\|\n\n", page, re.MULTILINE)
    with pytest.raises(ValueError, match="no records"):
        report.write_report(tmp_path)
