"""The lookup benchmark's results as a table."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

Record = dict[str, object]

_HEADERS = [
    "contender",
    "phase",
    "timing",
    "L2",
    "p50 us",
    "p10",
    "p90",
    "/ fbgemm",
    "floor",
    "/ floor",
    "host us",
    "peak MiB",
    "error",
]
_FORMATS = ["", "", "", "", ".1f", ".1f", ".1f", ".2f", ".1f", ".1f", ".0f", ".2f", ".1e"]


def ratio_to_fbgemm(record: Record, records: Sequence[Record]) -> float | None:
    """Median over that of `fbgemm` in fp32 in the same phase, timing and cache state."""
    same = ("workload", "phase", "timing", "cold")
    for other in records:
        is_fbgemm = (other["contender"], other["precision"]) == ("fbgemm", "fp32")
        if is_fbgemm and all(other[key] == record[key] for key in same) and "p50_us" in other:
            return round(record["p50_us"] / other["p50_us"], 3) if "p50_us" in record else None
    return None


def format_results(workload: Record, records: Sequence[Record]) -> str:
    """A workload's table: phase by phase and way by way, the contenders below one another."""
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        if record["workload"] == workload["name"]:
            group = (record["phase"], record["timing"], record["cold"])
            groups.setdefault(group, []).append(record)
    # Records come contender by contender, so phases and ways appear in their own order.
    phases = list(dict.fromkeys(phase for phase, _, _ in groups))
    ordered = sorted(groups.items(), key=lambda item: phases.index(item[0][0]))
    rows = [_row(record, records) for _, members in ordered for record in members]
    title = (
        f"{workload['name']}: {workload['lookups']:,} lookups, {workload['distinct_rows']:,} "
        f"distinct rows, {workload['distinct_prefixes']:,} distinct prefixes"
    )
    return f"{title}\n{tabulate(rows, _HEADERS, floatfmt=_FORMATS)}\n"


def _row(record: Record, records: Sequence[Record]) -> list[object]:
    median, floor = record.get("p50_us"), record["floor_us"]
    peak = record["peak_bytes_above_parameters"]
    return [
        f"{record['contender']} {record['precision']}",
        record["phase"],
        record["timing"],
        "failed" if "failure" in record else "cold" if record["cold"] else "warm",
        median,
        record.get("p10_us"),
        record.get("p90_us"),
        ratio_to_fbgemm(record, records),
        floor,
        median / floor if median and floor else None,
        record["host_us"],
        None if peak is None else peak / 2**20,
        record["relative_error"],
    ]
