"""Draws the tables and plots of docs/performance from the records of the lookup benchmarks.

    python benchmarks/performance_report.py docs/performance/h200

reads ``lookup.json``, ``sweep.json`` and ``ablation.json`` of that folder, those that are there,
and writes plots into it and the page beside it: ``docs/performance/h200.md``. ``make performance``
installs what the plots need and runs this.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import performance_plots as plots
import performance_tables as tables
from performance_optimizers import optimizers_table
from performance_provenance import Record, provenance

_WARM = {"phase": "forward", "timing": "graph", "cold": False}
_CHAINED = {**_WARM, "timing": "chain"}
_TRAINING = {**_WARM, "phase": "training"}
_SWEEPS = {
    "batch": ("Batch size", "bags of one lookup"),
    "ranks": ("Ranks", "TT ranks (r, r)"),
    "columns": ("Columns", "columns D"),
    "cores": ("Number of cores", "cores"),
}


def read(folder: Path, name: str) -> list[Record]:
    """Records of a file, none if it is not there."""
    path = folder / f"{name}.json"
    records: list[Record] = json.loads(path.read_text()) if path.exists() else []
    return records


def lookup_sections(records: Sequence[Record], folder: Path) -> list[str]:
    """The named workloads."""
    plots.plot_workloads(records, folder / "workloads.svg")
    sections = [
        "## Workloads",
        tables.shapes_table(records),
        "## Forward",
        "Each forward is a CUDA graph of its own, warm cache, other indices every time:",
        tables.times_table(records, **_WARM),
        f"![time of a forward by workload]({folder.name}/workloads.svg)",
        "The same against others. EcoRec's times are in `benchmarks/lookup_peers.py`:",
        tables.ratios_table(records, **_WARM),
        "Errors relative to float64 (Frobenius norm), and the peak of memory above parameters, "
        "indices and output:",
        tables.errors_table(records, **_WARM),
    ]
    if tables.select(records, **_CHAINED):
        sections += [
            "Eight forwards in one graph, time of one (without the fixed time of a graph's "
            "launch):",
            tables.times_table(records, **_CHAINED),
            tables.ratios_table(records, **_CHAINED),
        ]
    cold = tables.select(records, **{**_WARM, "cold": True})
    if cold:
        sections += [
            "Cold: a buffer larger than the L2 cache was read before each:",
            tables.times_table(cold),
        ]
    training = tables.select(records, **_TRAINING)
    if training:
        sections += [
            "## Training step",
            _describe_training(training),
            tables.training_table(training),
        ]
    if optimizers := optimizers_table(training):
        sections += [
            "### Optimizers",
            "The same with other optimizers, TT tables in tf32, FBGEMM's in fp32; in brackets the "
            "ratio to SGD:",
            optimizers,
        ]
    return sections


def _describe_training(records: Sequence[Record]) -> str:
    slower = tables.slower_than_ecorec(records, "fp32")
    verdict = f"; fp32 takes longer than EcoRec on {', '.join(slower)}" if slower else ""
    return (
        "Forward, backward and SGD, as a graph, warm. EcoRec was measured apart, "
        f"`benchmarks/lookup_peers.py` says with what{verdict}:"
    )


def sweep_sections(records: Sequence[Record], folder: Path) -> list[str]:
    """One section for each property that was varied."""
    sections = []
    for sweep, (title, label) in _SWEEPS.items():
        if not any(sweep in record["sweeps"] for record in records):
            continue
        plots.plot_sweep(records, sweep, label, folder / f"{sweep}.svg")
        base = next(r["workload"] for r in records if sweep in r["sweeps"]).partition(":")[0]
        same = tables.common_factors(records, sweep, **_WARM)
        factors = f"; {', '.join(same)} in every row" if same else ""
        sections += [
            f"## {title}",
            f"{base} with other values{factors}; a forward as a graph, warm, us:",
            tables.sweep_table(records, sweep, label, **_WARM),
            f"![time of a forward by {label}]({folder.name}/{sweep}.svg)",
        ]
        if any(sweep in record["sweeps"] for record in tables.select(records, **_TRAINING)):
            plot = folder / f"{sweep}_training.svg"
            plots.plot_sweep(records, sweep, label, plot, phase="training")
            sections += [
                "A training step (forward, backward, SGD) as a graph, warm, us:",
                tables.sweep_table(records, sweep, label, **_TRAINING),
                f"![time of a training step by {label}]({folder.name}/{plot.name})",
            ]
    return sections


def floor_sections(lookup: Sequence[Record], sweep: Sequence[Record], folder: Path) -> list[str]:
    """Distance to the floor of every case."""
    chosen = [r for r in tables.select([*lookup, *sweep], **_WARM) if r["floor"]]
    if not chosen:
        return []
    # The same case may be in two files; the named workloads come first.
    cases: dict[tuple[str, str], Record] = {}
    for record in chosen:
        if record["contender"] == "flowtt":
            name = tables.describe_case(record["workload"])
            cases.setdefault((name, record["precision"]), record)
    plots.plot_floors([(name, record) for (name, _), record in cases.items()], folder / "floor.svg")
    return [
        "## Distance to the floor",
        "The floor of a forward is the largest of: output bytes at the rate of writing device "
        "memory, the chain's FLOP (in the best order, each distinct part once, as counted in the "
        "batches) at the rate of `mma.sync`, and the slices that occur at the rate of L2 "
        "(`benchmarks/lookup_floor.py` has the rates). Grouping and the launch are not in it.",
        f"![measured time over floor]({folder.name}/floor.svg)",
        tables.floors_table(lookup, **_WARM),
    ]


def ablation_sections(records: Sequence[Record], folder: Path) -> list[str]:
    """What each mechanism is worth."""
    plots.plot_ablation(records, folder / "ablation.svg")
    sections = [
        "## What each mechanism is worth",
        "`FLOWTT_CUDA_DISABLE` switches mechanisms off ([kernels](../kernels.md)). A forward as a "
        "graph, warm, us; in brackets the ratio to everything on.",
        f"![time with mechanisms off]({folder.name}/ablation.svg)",
    ]
    for precision, products in (("tf32", "One product"), ("fp32", "Three products")):
        chosen = tables.select(records, precision=precision)
        if chosen:
            sections += [f"{products} ({precision}):", tables.ablation_table(chosen, **_WARM)]
    return sections


def write_report(folder: Path) -> Path:
    """Writes plots and page; the page's path."""
    lookup, sweep, ablation = (read(folder, name) for name in ("lookup", "sweep", "ablation"))
    if not (lookup or sweep or ablation):
        raise ValueError(f"no records in {folder}: expected lookup.json, sweep.json, ablation.json")
    files = {"lookup": lookup, "sweep": sweep, "ablation": ablation}
    runs = [record["run"] for records in files.values() for record in records]
    cards = {run.get("card", run["cpu"]) for run in runs}
    blocks = [
        f"# Measured: {', '.join(sorted(cards))}",
        "`make performance` draws this page from the records beside it. Medians by the device's "
        "clock; every contender was checked against float64 first. `benchmarks/device_timing.py` "
        "says how times are taken, the JSON files have deciles 1 and 9 too. fp32 is the default "
        "precision (three fp16 products); tf32 and bf16 (cores of 16 bits) take one product. "
        "deterministic is fp32 under `torch.use_deterministic_algorithms(True)`; kept is a module "
        "after `keep_packed_cores()`, whose copies count as memory; no check is FBGEMM without its "
        "check of the indices, which TT lookups always do. Tables with too few lookups to pay for "
        "sorting and packing (serving) take the general kernel, in fp32 at every precision. "
        "EcoRec's times are those of its paper's code on the same card.",
        "\n".join(
            provenance(records, name).replace("{folder}", folder.name)
            for name, records in files.items()
            if records
        ),
    ]
    failures = [record for records in files.values() for record in records if record["failure"]]
    if failures:
        blocks.append(
            "Not measured: "
            + "; ".join(
                f"{record['workload']} {record['contender']} {record['precision']} "
                f"{record['phase'] or ''} ({record['failure'].splitlines()[0]})"
                for record in failures
            )
            + "."
        )
    blocks += lookup_sections(lookup, folder) if lookup else []
    blocks += sweep_sections(sweep, folder) if sweep else []
    blocks += floor_sections(lookup, sweep, folder)
    blocks += ablation_sections(ablation, folder) if ablation else []
    page = folder.with_suffix(".md")
    page.write_text("\n\n".join(blocks) + "\n")
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws the page of one folder."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    print(write_report(parser.parse_args(arguments).folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
