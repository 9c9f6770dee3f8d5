"""The lookup benchmarks' results as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from lookup_measurement import Record
from tabulate import tabulate

_COLUMNS = {
    "p50 us": ("p50_us", ".1f"),
    "p10": ("p10_us", ".1f"),
    "p90": ("p90_us", ".1f"),
    "/ fbgemm": ("ratio_to_fbgemm", ".2f"),
    "/ no check": ("ratio_to_fbgemm_no_check", ".2f"),
    "/ tf32": ("ratio_to_tf32", ".2f"),
    "/ sgd": ("ratio_to_sgd", ".2f"),
    "/ uniform": ("ratio_to_uniform", ".2f"),
    "/ all on": ("ratio_to_all_on", ".2f"),
    "x ecorec": ("times_faster_than_ecorec", ".2f"),
    "floor": ("floor_us", ".1f"),
    "/ floor": ("ratio_to_floor", ".1f"),
    "host us": ("host_us", ".0f"),
    "peak MiB": ("peak_bytes_above_parameters", ".2f"),
    "error": ("relative_error", ".1e"),
}


def format_results(name: str, records: Sequence[Record]) -> str:
    """A workload's table: phase by phase and way by way, the contenders below one another.

    Below it stands why contenders failed.
    """
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        if record["workload"] == name:
            group = (record["phase"], record["timing"], record["cold"])
            groups.setdefault(group, []).append(record)
    if not groups:
        return f"{name}: nothing to measure, no contender has these phases\n"
    # Records come contender by contender, so phases and ways appear in their own order.
    phases = list(dict.fromkeys(phase for phase, _, _ in groups))
    ordered = sorted(groups.items(), key=lambda item: phases.index(item[0][0]))
    members = [record for _, group in ordered for record in group]
    shape = members[0]["shape"]
    title = (
        f"{name}: {shape['lookups']:,} lookups, {shape['distinct_rows']:,} "
        f"distinct rows, {shape['distinct_prefixes']:,} distinct prefixes"
    )
    # A column in which no contender has a value says nothing.
    shown = {
        name: (key, form)
        for name, (key, form) in _COLUMNS.items()
        if any(record.get(key) is not None for record in members)
    }
    headers = ["contender", "phase", "timing", "L2", *shown]
    formats = ["", "", "", "", *(form for _, form in shown.values())]
    rows = [
        [*_labels(record), *(_value(record, key) for key, _ in shown.values())]
        for record in members
    ]
    reasons = dict.fromkeys(
        f"{_labels(record)[0]} failed: {record['failure']}\n"
        for record in members
        if record["failure"]
    )
    return f"{title}\n{tabulate(rows, headers, floatfmt=formats)}\n{''.join(reasons)}"


def _value(record: Record, key: str) -> float | None:
    value = record.get(key)
    return value / 2**20 if value is not None and key.endswith("bytes_above_parameters") else value


def _labels(record: Record) -> list[object]:
    state = "failed" if record["failure"] else "cold" if record["cold"] else "warm"
    disabled = record.get("disabled", "none")
    without = "" if disabled == "none" else f" without {disabled}"
    contender = f"{record['contender']} {record['precision']}{without}"
    return [contender, record["phase"], record["timing"], state]
