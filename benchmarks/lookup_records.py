"""Records of the lookup benchmarks: their file, and the ratios between them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from lookup_measurement import Record
from lookup_optimizers import CONTENDER_SUFFIXES
from lookup_peers import ECOREC_US
from lookup_workloads import Distinct, Workload

_SETTING = ("phase", "timing", "cold")


def describe_workload(workload: Workload, distinct: Distinct, index_sets: int) -> Record:
    """Shape of a workload, and how much the lookups of a batch share."""
    return {
        **dataclasses.asdict(workload),
        "p_shapes": workload.spec.p_shapes,
        "q_shapes": workload.spec.q_shapes,
        "lookups": workload.num_lookups,
        "distinct_rows": round(distinct.rows),
        "distinct_prefixes": round(distinct.prefixes[-2]),
        "distinct_of_each_level": [round(count) for count in distinct.prefixes],
        "index_sets": index_sets,
    }


def add_ratios(records: Sequence[Record]) -> None:
    """Sets each record's ratios to others of the same phase, way of timing and cache state.

    ``ratio_to_fbgemm``, ``ratio_to_fbgemm_no_check``: to FBGEMM in fp32 on the same workload, with
    the same optimizer. ``ratio_to_tf32``: to the same contender in tf32. ``ratio_to_sgd``: of
    another optimizer, to the same tables in the same precision with SGD. ``ratio_to_uniform``: of a
    workload with a heavy prefix, to the one without. ``times_faster_than_ecorec``, which is with
    SGD: see `lookup_peers`. ``ratio_to_floor``: see `lookup_floor`. None where there is nothing to
    compare with.
    """
    medians: dict[tuple[object, ...], float] = {}
    twins: dict[str, str] = {}
    shapes = {record["workload"]: _shape_of(record) for record in records}
    for record in records:
        if record["p50_us"] is not None:
            medians[_key(record)] = record["p50_us"]
    for name, shape in shapes.items():
        for other, other_shape in shapes.items():
            if shape.prefix_share > 0 and other_shape == shape.uniform_twin:
                twins[name] = other
    for record in records:
        median, floor = record["p50_us"], record["floor_us"]
        published = ECOREC_US.get(record["workload"], {}).get(record["phase"])
        # Older records do not say that they are of SGD.
        suffix = CONTENDER_SUFFIXES[record.get("optimizer", "exact_sgd")]
        if suffix or not record["contender"].startswith("flowtt"):
            published = None

        def ratio(
            median: float | None = median, record: Record = record, **other: object
        ) -> object:
            divisor = medians.get(_key({**record, **other}))
            return None if median is None or divisor is None else round(median / divisor, 3)

        for other in ("fbgemm", "fbgemm_no_check"):
            record[f"ratio_to_{other}"] = ratio(contender=other + suffix, precision="fp32")
        record["ratio_to_tf32"] = ratio(precision="tf32")
        with_sgd = record["contender"].removesuffix(suffix) if suffix else None
        record["ratio_to_sgd"] = ratio(contender=with_sgd)
        record["ratio_to_uniform"] = ratio(workload=twins.get(record["workload"]))
        record["times_faster_than_ecorec"] = median and published and round(published / median, 3)
        record["ratio_to_floor"] = median and floor and round(median / floor, 2)


def _key(record: Record) -> tuple[object, ...]:
    names = ("workload", "contender", "precision", "disabled", *_SETTING)
    return tuple(record.get(name) for name in names)


def _shape_of(record: Record) -> Workload:
    fields = [field.name for field in dataclasses.fields(Workload)]
    values = {name: record["shape"][name] for name in fields}
    return Workload(**{**values, "name": ""})


def write_records(path: Path, records: Iterable[Record]) -> None:
    """A JSON list, one record a line, so that a later run's differences can be read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(record) for record in records)
    path.write_text(f"[\n{lines}\n]\n")


def read_records(path: Path) -> list[Record]:
    """What `write_records` wrote."""
    records: list[Record] = json.loads(path.read_text())
    return records
