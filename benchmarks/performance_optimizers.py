"""Markdown table of training steps with different optimizers."""

from __future__ import annotations

from collections.abc import Sequence

from performance_provenance import Found, Record
from performance_tables import cell, microseconds, names, of_contender, select, table

# What a contender's name has at its end, by optimizer as the columns are called.
_SUFFIXES = {
    "SGD": "",
    "Adagrad": "_adagrad",
    "row-wise Adagrad": "_row_wise_adagrad",
    "Adam": "_adam",
}


def optimizers_table(records: Sequence[Record]) -> str:
    """Medians of training steps, of TT tables in tf32 and of FBGEMM's in fp32, and their ratios.

    In brackets behind a time is its ratio to SGD. Empty if only SGD was measured.
    """
    rows = []
    found: Found = {}
    for name in names(select(records)):
        ours = {
            optimizer: of_contender(records, f"flowtt{suffix}", "tf32", workload=name)
            for optimizer, suffix in _SUFFIXES.items()
        }
        if not any(record for optimizer, record in ours.items() if optimizer != "SGD"):
            continue
        theirs = {
            f"FBGEMM, {optimizer}": of_contender(records, f"fbgemm{suffix}", "fp32", workload=name)
            for optimizer, suffix in _SUFFIXES.items()
        }
        found[name] = {**ours, **theirs}
        ratios = [cell(record, "ratio_to_fbgemm", "{:.2f}") for record in ours.values()]
        rows.append([name, *map(_with_ratio, found[name].values()), *ratios])
    if not rows:
        return ""
    headers = ["us", *_SUFFIXES, *(f"FBGEMM, {optimizer}" for optimizer in _SUFFIXES)]
    headers += [f"{optimizer} / FBGEMM" for optimizer in _SUFFIXES]
    return table(headers, rows, found)


def _with_ratio(record: Record | None) -> str:
    time = microseconds(record)
    if record is None or record.get("ratio_to_sgd") is None:
        return time
    return f"{time} ({record['ratio_to_sgd']:.2f})"
