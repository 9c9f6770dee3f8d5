"""What the figures of docs/performance were measured with: card, versions and commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Record = dict[str, Any]
Found = dict[str, dict[str, Record | None]]  # the records that a table shows, by row and column
_Cell = tuple[str, str]


def provenance(records: Sequence[Record], file: str) -> str:
    """What was measured with what: one line for each run that a file has records of."""
    lines: dict[str, list[str]] = {}
    for record in records:
        phases = lines.setdefault(_describe_run(record["run"]), [])
        if record.get("phase") and record["phase"] not in phases:
            phases.append(record["phase"])
    link = f"[{file}.json]({{folder}}/{file}.json)"
    if len(lines) == 1:
        return f"* {link}: {next(iter(lines))}."
    return "\n".join(f"* {link}, {' and '.join(phases)}: {run}." for run, phases in lines.items())


def measured_with(found: Found) -> str:
    """Card, versions and commit of a table's records, in one line.

    What all share is said once. Where runs differ, those with fewer cells name their columns or
    rows (a row that is not theirs alone with the columns that are), and the largest has the rest.
    """
    cells: dict[tuple[str, ...], list[_Cell]] = {}
    for row, columns in found.items():
        for column, record in columns.items():
            if record is not None:
                cells.setdefault(_parts(record["run"]), []).append((row, column))
    if not cells:
        return ""
    differs = [len(set(values)) > 1 for values in zip(*cells, strict=True)]
    first = next(iter(cells))
    said = [part for part, other in zip(first, differs, strict=True) if not other]
    every = [cell for own in cells.values() for cell in own]
    largest = max(cells, key=lambda parts: len(cells[parts]))
    for parts in sorted(cells, key=lambda parts: parts == largest):  # which comes last
        own = ", ".join(part for part, other in zip(parts, differs, strict=True) if other)
        place = "the rest" if parts == largest else _place(cells[parts], every)
        said += [f"{own}: {place}"] if own else []
    return f"Measured: {'; '.join(said)}."


def _place(own: Sequence[_Cell], every: Sequence[_Cell]) -> str:
    """Where cells are in a table, of which `every` has all."""

    def whole(axis: int) -> list[str]:
        others = {cell[axis] for cell in every if cell not in own}
        return [name for name in _distinct(cell[axis] for cell in own) if name not in others]

    rows, columns = whole(0), whole(1)
    if {row for row, _ in own} != set(rows) and {column for _, column in own} == set(columns):
        return _italic(columns)
    places = []
    for row in _distinct(row for row, _ in own):
        place = _italic([row])
        if row not in rows:
            place += f" ({_italic([column for other, column in own if other == row])})"
        places.append(place)
    return ", ".join(places)


def _distinct(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _italic(names: Sequence[str]) -> str:
    # Names may have commas in them.
    return ", ".join(f"*{name}*" for name in names)


def _parts(run: Record) -> tuple[str, str, str]:
    card = run.get("card", run["cpu"])
    if "driver" in run:
        card += f", driver {run['driver']}, CUDA {run['cuda']}"
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    commit, *marks = run["commit"].split("-")
    return card, versions, "-".join([f"commit {commit[:12]}", *marks])


def _describe_run(run: Record) -> str:
    smallest = run.get("smallest_kernel_us", {})
    empty = ", ".join(f"{way} {time} us" for way, time in smallest.items())
    parts = [
        *_parts(run),
        run["date"][:10],
        f"`{run['command']}`",
        f"an empty kernel reads {empty}" if empty else "",
    ]
    return "; ".join(part for part in parts if part)
