"""Markdown tables of the records that the lookup benchmarks write."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tabulate import tabulate

Record = dict[str, Any]

# Contender and precision, as the columns are called.
CONTENDERS = {
    "fp32": ("flowtt", "fp32"),
    "tf32": ("flowtt", "tf32"),
    "fp16": ("flowtt", "fp16"),
    "bf16": ("flowtt", "bf16"),
    "deterministic": ("flowtt_deterministic", "fp32"),
    "FBGEMM": ("fbgemm", "fp32"),
    "FBGEMM, no check": ("fbgemm_no_check", "fp32"),
    "FBGEMM, fp16": ("fbgemm", "fp16"),
}
_NONE = "–"


def select(records: Iterable[Record], **values: object) -> list[Record]:
    """Those with the given values, and without a failure."""
    return [
        record
        for record in records
        if not record["failure"] and all(record.get(key) == value for key, value in values.items())
    ]


def one(records: Iterable[Record], column: str, **values: object) -> Record | None:
    """The record of a column of `CONTENDERS`, if there is one."""
    contender, precision = CONTENDERS[column]
    found = select(records, contender=contender, precision=precision, **values)
    return found[0] if found else None


def cell(record: Record | None, key: str, form: str = "{:.1f}") -> str:
    """A value of a record as text."""
    value = None if record is None else record.get(key)
    return _NONE if value is None else form.format(value)


def microseconds(record: Record | None) -> str:
    """Median, with fewer decimals the longer it is."""
    value = None if record is None else record["p50_us"]
    return _NONE if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def mebibytes(record: Record | None) -> str:
    """Peak memory."""
    value = None if record is None else record["peak_bytes_above_parameters"]
    return _NONE if value is None else f"{value / 2**20:.2f}"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """In Markdown, the first column left-aligned; columns without values are left out."""
    rows = [list(row) for row in rows]
    kept = [i for i in range(len(headers)) if i == 0 or any(row[i] != _NONE for row in rows)]
    shown = [[row[i] for i in kept] for row in rows]
    aligned = ["left", *["right"] * (len(kept) - 1)]
    return tabulate(
        shown,
        [headers[i] for i in kept],
        tablefmt="pipe",
        colalign=aligned if shown else None,
        disable_numparse=True,
    )


def names(records: Iterable[Record], key: str = "workload") -> list[str]:
    """Values of a key, in the order in which they come."""
    return list(dict.fromkeys(record[key] for record in records))


def describe_case(workload: str) -> str:
    """A workload's name as a reader wants it.

    >>> describe_case("W1:tt_ranks=128x128"), describe_case("W1:batch_size=1048576")
    ('W1, ranks 128x128', 'W1, batch 1,048,576')
    """
    name, _, changes = workload.partition(":")
    described = [name]
    for change in filter(None, changes.split(",")):
        field, _, value = change.partition("=")
        words = {"tt_ranks": "ranks", "embedding_dim": "D", "batch_size": "batch"}
        shown = f"{int(value):,}" if value.isdigit() else value
        described.append(f"{words.get(field, field)} {shown}")
    return ", ".join(described)


def shapes_table(records: Sequence[Record]) -> str:
    """What the workloads are."""
    rows = []
    for name in names(records):
        shape = next(record["shape"] for record in records if record["workload"] == name)
        law = f"zipf {shape['alpha']}" if shape["alpha"] else "uniform"
        if shape["prefix_share"]:
            law += f", {shape['prefix_share']:.0%} in one prefix"
        rows.append(
            [
                name,
                shape["tables"],
                f"{shape['num_embeddings']:,} x {shape['embedding_dim']}",
                _times(shape["p_shapes"]),
                _times(shape["q_shapes"]),
                _times(shape["tt_ranks"]),
                f"{shape['batch_size']:,} x {shape['pooling_factor']}",
                law,
                f"{shape['distinct_rows']:,}",
                f"{shape['distinct_prefixes']:,}",
            ]
        )
    headers = ["workload", "tables", "rows x columns", "p", "q", "ranks", "bags x lookups", "ids"]
    return table([*headers, "distinct rows", "distinct prefixes"], rows)


def times_table(records: Sequence[Record], **setting: object) -> str:
    """Medians of all contenders in one phase, way of timing and state of the cache."""
    chosen = select(records, **setting)
    rows = [
        [name, *(microseconds(one(chosen, column, workload=name)) for column in CONTENDERS)]
        for name in names(chosen)
    ]
    return table(["us", *CONTENDERS], rows)


def ratios_table(records: Sequence[Record], **setting: object) -> str:
    """The figures that a reader compares: times over others' times, and over the floor."""
    chosen = select(records, **setting)
    rows = []
    for name in names(chosen):
        tf32, fp32 = (one(chosen, column, workload=name) for column in ("tf32", "fp32"))
        rows.append(
            [
                name,
                cell(tf32, "ratio_to_fbgemm", "{:.2f}"),
                cell(tf32, "ratio_to_fbgemm_no_check", "{:.2f}"),
                cell(fp32, "ratio_to_fbgemm", "{:.2f}"),
                cell(fp32, "ratio_to_tf32", "{:.2f}"),
                cell(tf32, "ratio_to_uniform", "{:.2f}"),
                cell(fp32, "ratio_to_uniform", "{:.2f}"),
                cell(tf32, "times_faster_than_ecorec", "{:.0f}"),
                cell(fp32, "times_faster_than_ecorec", "{:.0f}"),
            ]
        )
    headers = [
        "workload",
        "tf32 / FBGEMM",
        "tf32 / no check",
        "fp32 / FBGEMM",
        "fp32 / tf32",
        "skewed / uniform, tf32",
        "skewed / uniform, fp32",
        "x faster than EcoRec, tf32",
        "fp32",
    ]
    return table(headers, rows)


def errors_table(records: Sequence[Record], **setting: object) -> str:
    """Relative errors and peak memory."""
    chosen = select(records, **setting)
    columns = ("fp32", "tf32", "fp16", "bf16")
    rows = []
    for name in names(chosen):
        found = [one(chosen, column, workload=name) for column in columns]
        errors = [cell(record, "relative_error", "{:.1e}") for record in found]
        rows.append([name, *errors, *(mebibytes(record) for record in found)])
    headers = [f"error {column}" for column in columns] + [f"MiB {column}" for column in columns]
    return table(["workload", *headers], rows)


def floors_table(records: Sequence[Record], **setting: object) -> str:
    """Floors of the forward, what bounds them, and how far the times are from them."""
    chosen = [record for record in select(records, **setting) if record["floor"]]
    rows = []
    for name in names(chosen):
        for column in ("tf32", "fp32"):
            record = one(chosen, column, workload=name)
            if record is None:
                continue
            floor = record["floor"]
            rows.append(
                [
                    f"{name}, {column}",
                    *(f"{floor[f'{term}_us']:.1f}" for term in ("memory", "mma", "l2")),
                    floor["bound"],
                    microseconds(record),
                    cell(record, "ratio_to_floor"),
                ]
            )
    headers = ["us", "memory", "MMA", "L2", "floor is", "measured", "/ floor"]
    return table(headers, rows)


def sweep_table(records: Sequence[Record], sweep: str, label: str, **setting: object) -> str:
    """Times, errors and floors over the values of one sweep."""
    chosen = [record for record in select(records, **setting) if sweep in record["sweeps"]]
    rows = []
    for value in sorted({record["sweeps"][sweep] for record in chosen}):
        here = [record for record in chosen if record["sweeps"][sweep] == value]
        found = {column: one(here, column) for column in CONTENDERS}
        ours = [found[column] for column in ("fp32", "tf32", "bf16")]
        rows.append(
            [
                f"{value:,}",
                *(microseconds(record) for record in found.values()),
                *(cell(record, "floor_us") for record in ours[:2]),
                ours[0]["floor"]["bound"] if ours[0] and ours[0]["floor"] else _NONE,
                *(cell(record, "relative_error", "{:.0e}") for record in ours),
                mebibytes(found["fp32"]),
            ]
        )
    headers = [label, *CONTENDERS, "floor fp32", "floor tf32", "fp32 bound by"]
    headers += [f"error {column}" for column in ("fp32", "tf32", "bf16")] + ["MiB fp32"]
    return table(headers, rows)


def ablation_table(records: Sequence[Record], **setting: object) -> str:
    """Times with mechanisms off, and their ratios to the time with everything on."""
    chosen = select(records, **setting)
    variants = names(chosen, "disabled")
    rows = []
    for name in names(chosen):
        row = [describe_case(name)]
        for variant in variants:
            found = select(chosen, workload=name, disabled=variant)
            record = found[0] if found else None
            ratio = "" if variant == "none" else f" ({cell(record, 'ratio_to_all_on', '{:.2f}')})"
            row.append(_NONE if record is None else microseconds(record) + ratio)
        rows.append(row)
    labels = {"none": "everything on", "all": "all off"}
    return table(["us", *(labels.get(name, f"no {name}") for name in variants)], rows)


def _times(numbers: Sequence[int]) -> str:
    return " x ".join(map(str, numbers))
