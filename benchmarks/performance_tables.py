"""Markdown tables of the records that the lookup benchmarks write."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from lookup_peers import ECOREC_US
from performance_provenance import Found, Record, measured_with
from tabulate import tabulate

# Contender and precision, as the columns are called.
CONTENDERS = {
    "fp32": ("flowtt", "fp32"),
    "tf32": ("flowtt", "tf32"),
    "fp16": ("flowtt", "fp16"),
    "bf16": ("flowtt", "bf16"),
    "deterministic": ("flowtt_deterministic", "fp32"),
    "fp32, kept": ("flowtt_packed", "fp32"),
    "tf32, kept": ("flowtt_packed", "tf32"),
    "FBGEMM": ("fbgemm", "fp32"),
    "FBGEMM, no check": ("fbgemm_no_check", "fp32"),
    "FBGEMM, fp16": ("fbgemm", "fp16"),
}
_FACTORS = {"p": "p_shapes", "q": "q_shapes"}
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
    return of_contender(records, *CONTENDERS[column], **values)


def of_contender(
    records: Iterable[Record], contender: str, precision: str, **values: object
) -> Record | None:
    """The record of a contender, if there is one."""
    found = select(records, contender=contender, precision=precision, **values)
    return found[0] if found else None


def cell(record: Record | None, key: str, form: str = "{:.1f}") -> str:
    """A value of a record as text."""
    value = None if record is None else record.get(key)
    return _NONE if value is None else form.format(value)


def microseconds(record: Record | None) -> str:
    """Median, with fewer decimals the longer it is."""
    return _duration(None if record is None else record["p50_us"])


def mebibytes(record: Record | None) -> str:
    """Peak memory."""
    value = None if record is None else record["peak_bytes_above_parameters"]
    return _NONE if value is None else f"{value / 2**20:.2f}"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], found: Found) -> str:
    """In Markdown, the first column left-aligned; columns without values are left out.

    A line below says what the records in it (`found`) were measured with.
    """
    rows = [list(row) for row in rows]
    kept = [i for i in range(len(headers)) if i == 0 or any(row[i] != _NONE for row in rows)]
    shown = [[row[i] for i in kept] for row in rows]
    aligned = ["left", *["right"] * (len(kept) - 1)]
    text = tabulate(
        shown,
        [headers[i] for i in kept],
        tablefmt="pipe",
        colalign=aligned if shown else None,
        disable_numparse=True,
    )
    return "\n\n".join(filter(None, (text, measured_with(found))))


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
    found: Found = {}
    for name in names(records):
        record = next(record for record in records if record["workload"] == name)
        found[name], shape = {"": record}, record["shape"]
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
    return table([*headers, "distinct rows", "distinct prefixes"], rows, found)


def times_table(records: Sequence[Record], **setting: object) -> str:
    """Medians of all contenders in one phase, way of timing and state of the cache."""
    found = _by_workload(select(records, **setting), CONTENDERS)
    rows = [[name, *map(microseconds, here.values())] for name, here in found.items()]
    return table(["us", *CONTENDERS], rows, found)


def training_table(records: Sequence[Record]) -> str:
    """Medians of training steps, EcoRec's, and those over these."""
    found = _by_workload(select(records), CONTENDERS)
    ours = ("fp32", "tf32", "bf16")
    rows = []
    for name, here in found.items():
        ecorec = ECOREC_US.get(name, {}).get("training")
        ratios = [_over(here[column], ecorec) for column in ours]
        rows.append([name, *map(microseconds, here.values()), _duration(ecorec), *ratios])
    headers = ["us", *CONTENDERS, "EcoRec", *(f"{column} / EcoRec" for column in ours)]
    return table(headers, rows, found)


def slower_than_ecorec(records: Sequence[Record], column: str) -> list[str]:
    """Workloads whose training step takes longer than EcoRec's."""
    return [
        name
        for name, here in _by_workload(select(records), [column]).items()
        if (record := here[column]) is not None
        and record["p50_us"] > ECOREC_US.get(name, {}).get("training", float("inf"))
    ]


def ratios_table(records: Sequence[Record], **setting: object) -> str:
    """The figures that a reader compares: times over others' times, and over the floor."""
    compared = ("tf32", "fp32", "FBGEMM", "FBGEMM, no check")
    found = _by_workload(select(records, **setting), compared)
    rows = []
    for name, here in found.items():
        tf32, fp32 = here["tf32"], here["fp32"]
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
    return table(headers, rows, found)


def errors_table(records: Sequence[Record], **setting: object) -> str:
    """Relative errors and peak memory."""
    columns = ("fp32", "tf32", "fp16", "bf16", "fp32, kept", "tf32, kept")
    found = _by_workload(select(records, **setting), columns)
    rows = []
    for name, here in found.items():
        errors = [cell(record, "relative_error", "{:.1e}") for record in here.values()]
        rows.append([name, *errors, *map(mebibytes, here.values())])
    headers = [f"error {column}" for column in columns] + [f"MiB {column}" for column in columns]
    return table(["workload", *headers], rows, found)


def floors_table(records: Sequence[Record], **setting: object) -> str:
    """Floors of the forward, what bounds them, and how far the times are from them."""
    chosen = [record for record in select(records, **setting) if record["floor"]]
    rows = []
    found: Found = {}
    for name, here in _by_workload(chosen, ("tf32", "fp32")).items():
        for column, record in here.items():
            if record is None:
                continue
            floor, row = record["floor"], f"{name}, {column}"
            found[row] = {"": record}
            rows.append(
                [
                    row,
                    *(f"{floor[f'{term}_us']:.1f}" for term in ("memory", "mma", "l2")),
                    floor["bound"],
                    microseconds(record),
                    cell(record, "ratio_to_floor"),
                ]
            )
    headers = ["us", "memory", "MMA", "L2", "floor is", "measured", "/ floor"]
    return table(headers, rows, found)


def common_factors(records: Sequence[Record], sweep: str, **setting: object) -> list[str]:
    """Row and column factors that are the same all over a sweep."""
    chosen = _of_sweep(records, sweep, setting)
    factors = {name: _factors(chosen, name) for name in _FACTORS}
    return [f"{name} = {found[0]}" for name, found in factors.items() if len(found) == 1]


def sweep_table(records: Sequence[Record], sweep: str, label: str, **setting: object) -> str:
    """Times, errors and floors over the values of one sweep, and the factors that it changes."""
    chosen = _of_sweep(records, sweep, setting)
    changed = [name for name in _FACTORS if len(_factors(chosen, name)) > 1]
    rows = []
    found: Found = {}
    for value in sorted({record["sweeps"][sweep] for record in chosen}):
        at_value = [record for record in chosen if record["sweeps"][sweep] == value]
        here = {column: one(at_value, column) for column in CONTENDERS}
        ours = [here[column] for column in ("fp32", "tf32", "bf16")]
        found[f"{value:,}"] = here
        rows.append(
            [
                f"{value:,}",
                *(" or ".join(_factors(at_value, name)) or _NONE for name in changed),
                *map(microseconds, here.values()),
                *(cell(record, "floor_us") for record in ours[:2]),
                ours[0]["floor"]["bound"] if ours[0] and ours[0]["floor"] else _NONE,
                *(cell(record, "relative_error", "{:.0e}") for record in ours),
                mebibytes(here["fp32"]),
            ]
        )
    headers = [label, *changed, *CONTENDERS]
    headers += ["floor fp32", "floor tf32", "fp32 bound by"]
    headers += [f"error {column}" for column in ("fp32", "tf32", "bf16")] + ["MiB fp32"]
    return table(headers, rows, found)


def ablation_table(records: Sequence[Record], **setting: object) -> str:
    """Times with mechanisms off, and their ratios to the time with everything on."""
    chosen = select(records, **setting)
    variants = {"none": "everything on", "all": "all off"}
    labels = {name: variants.get(name, f"no {name}") for name in names(chosen, "disabled")}
    rows = []
    found: Found = {}
    for name in names(chosen):
        row = [describe_case(name)]
        here = found.setdefault(row[0], {})
        for variant, label in labels.items():
            record = next(iter(select(chosen, workload=name, disabled=variant)), None)
            ratio = "" if variant == "none" else f" ({cell(record, 'ratio_to_all_on', '{:.2f}')})"
            row.append(_NONE if record is None else microseconds(record) + ratio)
            here[label] = record
        rows.append(row)
    return table(["us", *labels.values()], rows, found)


def _of_sweep(records: Sequence[Record], sweep: str, setting: Record) -> list[Record]:
    return [record for record in select(records, **setting) if sweep in record["sweeps"]]


def _factors(records: Sequence[Record], name: str) -> list[str]:
    # An uncompressed table has none, whatever its record says.
    compressed = [record for record in records if record["contender"].startswith("flowtt")]
    return list(dict.fromkeys(_times(record["shape"][_FACTORS[name]]) for record in compressed))


def _by_workload(records: Sequence[Record], columns: Collection[str]) -> Found:
    return {
        name: {column: one(records, column, workload=name) for column in columns}
        for name in names(records)
    }


def _over(record: Record | None, other: float | None) -> str:
    return _NONE if record is None or other is None else f"{record['p50_us'] / other:.2f}"


def _duration(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _times(numbers: Sequence[int]) -> str:
    return " x ".join(map(str, numbers))
