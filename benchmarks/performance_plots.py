"""Plots of the records that the lookup benchmarks write, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import FuncFormatter, NullLocator  # noqa: E402
from performance_provenance import Record  # noqa: E402
from performance_tables import describe_case, names, one, select  # noqa: E402

# Okabe and Ito's colours, which colour-blind readers can tell apart too.
_STYLES = {
    "fp32": {"color": "#0072B2", "marker": "o"},
    "tf32": {"color": "#009E73", "marker": "s"},
    "bf16": {"color": "#56B4E9", "marker": "^"},
    "FBGEMM": {"color": "#D55E00", "marker": "D"},
    "FBGEMM, no check": {"color": "#E69F00", "marker": "v"},
    "FBGEMM, fp16": {"color": "#CC79A7", "marker": "P"},
}
_FLOOR = {"color": "#555555", "linestyle": "--", "linewidth": 1.2}
_WARM = {"timing": "graph", "cold": False, "phase": "forward"}


def plot_sweep(
    records: Sequence[Record], sweep: str, label: str, path: Path, phase: str = "forward"
) -> None:
    """Time over the values of a sweep, both logarithmic, with the floors."""
    warm = select(records, **{**_WARM, "phase": phase})
    chosen = [record for record in warm if sweep in record["sweeps"]]
    values = sorted({record["sweeps"][sweep] for record in chosen})
    figure, axes = _figure(6.4, 4.0)
    for column, style in _STYLES.items():
        points = _points(chosen, sweep, values, column, "p50_us")
        if points:
            axes.plot(*zip(*points, strict=True), label=column, markersize=5, **style)
    for column, dashes in (("fp32", "--"), ("tf32", ":")):
        points = _points(chosen, sweep, values, column, "floor_us")
        if points:
            style = {**_FLOOR, "linestyle": dashes}
            axes.plot(*zip(*points, strict=True), label=f"floor, {column}", **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(values, [_short(value) for value in values])
    axes.set_xlabel(label)
    axes.set_ylabel("forward, us" if phase == "forward" else "training step, us")
    _plain_numbers(axes)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _save(figure, path)


def plot_workloads(records: Sequence[Record], path: Path) -> None:
    """Times of the named workloads as bars, with the floor of each bar that has one."""
    chosen = select(records, **_WARM)
    workloads = names(chosen)
    figure, axes = _figure(8.0, 3.6)
    columns = [column for column in _STYLES if any(one(chosen, column) for _ in "1")]
    width = 0.8 / max(1, len(columns))
    for i, column in enumerate(columns):
        for j, workload in enumerate(workloads):
            record = one(chosen, column, workload=workload)
            if record is None:
                continue
            left = j - 0.4 + i * width
            label = column if j == 0 else None
            color = _STYLES[column]["color"]
            axes.bar(left, record["p50_us"], width * 0.92, color=color, align="edge", label=label)
            if record["floor_us"]:
                height = record["floor_us"]
                axes.hlines(height, left, left + width * 0.92, color="black", linewidth=1.4)
    axes.hlines([], 0, 0, color="black", linewidth=1.4, label="floor")
    axes.set_xticks(range(len(workloads)), workloads)
    axes.set_ylabel("forward, us")
    axes.tick_params(axis="x", length=0)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _save(figure, path)


def plot_ablation(records: Sequence[Record], path: Path) -> None:
    """For every workload: time with mechanisms off over the time with all on."""
    chosen = select(records, **_WARM)
    workloads, variants = names(chosen), [name for name in names(chosen, "disabled")]
    variants = [name for name in variants if name != "none"]
    columns = min(4, len(workloads))
    rows = -(-len(workloads) // columns)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(2.3 * columns + 1, 2.2 * rows + 0.4),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axes, workload in zip(grid.flat, workloads, strict=False):
        for offset, column in ((-0.2, "tf32"), (0.2, "fp32")):
            for place, variant in enumerate(variants):
                record = one(chosen, column, workload=workload, disabled=variant)
                if record is None or record["ratio_to_all_on"] is None:
                    continue
                ratio = record["ratio_to_all_on"]
                label = column if place == 0 else None
                color = _STYLES[column]["color"]
                axes.barh(place + offset, ratio, 0.38, color=color, label=label)
                text = f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}"
                axes.text(ratio, place + offset, f" {text}", va="center", fontsize=6)
        axes.axvline(1, color="#555555", linewidth=1)
        axes.set_title(describe_case(workload), fontsize=8)
        axes.set_yticks(range(len(variants)), [_off(name) for name in variants], fontsize=7)
        axes.set_xlim(0, axes.get_xlim()[1] * 1.15)
        axes.tick_params(axis="both", labelsize=7, length=2)
        _bare(axes)
    grid[0, 0].invert_yaxis()  # the axes of all are shared
    for axes in grid.flat[len(workloads) :]:
        axes.set_visible(False)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, loc="outside right upper")
    figure.supxlabel("time with it off / time with everything on", fontsize=8)
    _save(figure, path)


def plot_floors(cases: Sequence[tuple[str, Record]], path: Path) -> None:
    """How many times its floor each case takes."""
    figure, axes = _figure(6.4, 0.2 * len(dict.fromkeys(name for name, _ in cases)) + 1.0)
    places = {name: i for i, name in enumerate(dict.fromkeys(name for name, _ in cases))}
    for column in ("fp32", "tf32"):
        points = [
            (record["ratio_to_floor"], places[name])
            for name, record in cases
            if one([record], column) and record["ratio_to_floor"]
        ]
        if points:
            style = {**_STYLES[column], "linestyle": "none", "markersize": 5}
            axes.plot(*zip(*points, strict=True), label=column, **style)
    axes.axvline(1, **_FLOOR)
    axes.set_xscale("log")
    axes.set_yticks(range(len(places)), list(places), fontsize=7)
    axes.set_ylim(len(places) - 0.5, -0.5)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_xlabel("measured time / floor")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _save(figure, path)


def _points(
    records: Sequence[Record], sweep: str, values: Sequence[int], column: str, key: str
) -> list[tuple[int, float]]:
    points = []
    for value in values:
        here = [record for record in records if record["sweeps"][sweep] == value]
        record = one(here, column)
        if record is not None and record[key] is not None:
            points.append((value, record[key]))
    return points


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(width, height))
    _bare(axes)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _bare(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _plain_numbers(axes: Axes) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def _short(value: int) -> str:
    if value >= 2**20 and value % 2**20 == 0:
        return f"{value // 2**20}M"
    return f"{value // 1024}K" if value >= 1024 and value % 1024 == 0 else str(value)


def _off(variant: str) -> str:
    return "all off" if variant == "all" else f"no {variant}"


def _save(figure: Figure, path: Path) -> None:
    # The same data give the same file: no date, no random ids.
    with plt.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
        if path.suffix == ".svg":
            lines = (line.rstrip() for line in path.read_text().splitlines())
            path.write_text("\n".join(lines) + "\n")
    plt.close(figure)
