"""TT lookups and FBGEMM's uncompressed ones, forward and training, by the device's clock.

    python benchmarks/lookup.py --output docs/performance/h200/lookup.json
    python benchmarks/lookup.py --workloads W1 --tt-ranks 64 64 --batch-size 8192
    python benchmarks/lookup.py --workloads W3p W3p:alpha=0 --contenders flowtt fbgemm/fp32

Every contender is checked against float64 before it is timed; a wrong one is refused, and then the
exit status is 1. `benchmarks/device_timing.py` says how times are taken. A workload is a named one
or a variant of it, ``NAME:key=value,key=value`` with `x` between the numbers of a tuple; options
change all of them. On the CPU (``--device cpu``) times are wall times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from device_timing import CudaTimer, smallest_kernel_times
from environment import describe_run
from lookup_contenders import DEFAULT_MODES, MODES, Mode, parameter_bytes, select_modes
from lookup_floor import RATES, lookup_floor
from lookup_measurement import (
    PHASES,
    Inputs,
    MemoryMeter,
    Plan,
    WrongResultError,
    measure_contender,
)
from lookup_report import Record, format_results, ratio_to_fbgemm
from lookup_workloads import WORKLOADS, Distinct, Workload, count_distinct, draw_batch

_FIELDS = {field.name: field for field in dataclasses.fields(Workload) if field.name != "name"}
_TUPLES = ("p_shapes", "q_shapes", "tt_ranks")
_MEMORY_SHARE = 0.8  # of a card's, that a contender's parameters may take


def parse_value(field: str, text: str) -> object:
    """The value of a workload's field.

    >>> parse_value("tt_ranks", "16x16"), parse_value("alpha", "1.05"), parse_value("tables", "8")
    ((16, 16), 1.05, 8)
    """
    if field not in _FIELDS:
        raise ValueError(f"a workload has no {field!r}; it has: {', '.join(_FIELDS)}")
    if field in _TUPLES:
        return tuple(int(part) for part in text.split("x"))
    kind = type(_FIELDS[field].default)
    return text.lower() in ("1", "true") if kind is bool else kind(text)


def parse_workload(text: str) -> Workload:
    """A named workload, or ``NAME:key=value,..``."""
    name, _, changes = text.partition(":")
    if name not in WORKLOADS:
        raise ValueError(f"no workload {name!r}; there are: {', '.join(WORKLOADS)}")
    pairs = [change.partition("=") for change in changes.split(",") if change]
    return WORKLOADS[name].variant(**{key: parse_value(key, text) for key, _, text in pairs})


def prepare_inputs(
    workload: Workload, modes: Sequence[Mode], index_sets: int, device: torch.device
) -> tuple[Inputs, Distinct]:
    """Draws the batches and counts what they share."""
    batches = [draw_batch(workload, seed, device) for seed in range(index_sets)]
    distinct = count_distinct(workload, batches)
    grad = torch.randn(workload.output_shape, device=device).to(workload.output_torch_dtype)
    rates = RATES.get(torch.cuda.get_device_name()) if device.type == "cuda" else None
    floors = {
        mode: lookup_floor(workload, distinct, mode.precision, mode.weights_dtype.itemsize, rates)
        for mode in modes
        if rates is not None and mode.contender.startswith("flowtt")
    }
    return Inputs(workload, batches, grad, floors), distinct


def describe_workload(inputs: Inputs, distinct: Distinct) -> dict[str, object]:
    """Shapes, and how much the lookups of a batch share."""
    workload = inputs.workload
    return {
        **dataclasses.asdict(workload),
        "p_shapes": workload.spec.p_shapes,
        "q_shapes": workload.spec.q_shapes,
        "lookups": workload.num_lookups,
        "distinct_rows": round(distinct.rows),
        "distinct_prefixes": round(distinct.prefixes[-2]),
        "distinct_of_each_level": [round(count) for count in distinct.prefixes],
        "index_sets": len(inputs.batches),
        "floors": {mode.key: dataclasses.asdict(floor) for mode, floor in inputs.floors.items()},
    }


def run(
    workloads: Sequence[Workload],
    modes: Sequence[Mode],
    plan: Plan,
    index_sets: int,
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    """Measures every contender on every workload; what is known after each workload.

    A result has ``workloads`` (shapes and counts), ``records`` (measurements), ``refused`` (what
    was not measured, and why) and ``smallest_kernel_us``.
    """
    timer = CudaTimer(plan.repetitions) if device.type == "cuda" else None
    memory = MemoryMeter()
    if timer is not None:
        warm_up_matmul(device)
    result: dict[str, Any] = {
        "smallest_kernel_us": None if timer is None else smallest_kernel_times(timer),
        "workloads": [],
        "refused": [],
        "records": [],
    }
    for workload in workloads:
        inputs, distinct = prepare_inputs(workload, modes, index_sets, device)
        result["workloads"].append(describe_workload(inputs, distinct))
        records: list[Record] = []
        for mode in modes:
            refusal = {"workload": workload.name, "mode": mode.key}
            if reason := too_large(workload, mode, device):
                result["refused"].append({**refusal, "reason": reason})
                continue
            try:
                records.extend(measure_contender(inputs, mode, plan, timer, memory))
            except WrongResultError as error:
                result["refused"].append({**refusal, "wrong": str(error)})
            except (RuntimeError, NotImplementedError) as error:
                result["refused"].append({**refusal, "failed": str(error)})
        for record in records:
            record["ratio_to_fbgemm"] = ratio_to_fbgemm(record, records)
        result["records"] += records
        yield result


def too_large(workload: Workload, mode: Mode, device: torch.device) -> str:
    """Why the tables do not fit, or nothing."""
    if device.type != "cuda":
        return ""
    available = int(torch.cuda.get_device_properties(device).total_memory * _MEMORY_SHARE)
    needed = parameter_bytes(workload, mode)
    return f"{needed} bytes of tables, {available} can be had" if needed > available else ""


def warm_up_matmul(device: torch.device) -> None:
    """Has torch allocate its matrix products' workspace, which no contender shall answer for."""
    for dtype in (torch.float32, torch.float64):
        product = torch.ones(2, 64, 64, dtype=dtype, device=device, requires_grad=True)
        (product @ product).sum().backward()


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Without options: all named workloads and the default contenders on the GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", type=parse_workload, nargs="+", metavar="NAME[:key=value]")
    parser.add_argument(
        "--contenders", nargs="+", default=DEFAULT_MODES, help=f"of {', '.join(MODES)}"
    )
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    ways = ("events", "graph", "chain")
    parser.add_argument("--timings", nargs="+", choices=ways, default=ways)
    parser.add_argument("--caches", nargs="+", choices=("warm", "cold"), default=("warm", "cold"))
    parser.add_argument("--repetitions", type=int, default=64)
    parser.add_argument("--index-sets", type=int, default=8, help="batches that take turns")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    shape = parser.add_argument_group("changes to the workloads")
    for name, field in _FIELDS.items():
        option = "--" + name.replace("_", "-")
        if name in _TUPLES:
            shape.add_argument(option, type=int, nargs="+")
        elif isinstance(field.default, bool):
            shape.add_argument(option, action="store_true", default=None)
        else:
            shape.add_argument(option, type=type(field.default))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark from the command line; 1 if a contender was wrong or failed."""
    options = parse_arguments(arguments)
    changes = {
        name: tuple(value) if name in _TUPLES else value
        for name in _FIELDS
        if (value := getattr(options, name)) is not None
    }
    workloads = [
        workload.variant(**changes) for workload in options.workloads or WORKLOADS.values()
    ]
    plan = Plan(
        phases=options.phases,
        timings=options.timings,
        colds=[cache == "cold" for cache in options.caches],
        repetitions=options.repetitions,
    )
    torch.manual_seed(0)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    modes = select_modes(options.contenders)
    described = {"benchmark": "lookup", **describe_run(), "device": str(device)}
    for measured in run(workloads, modes, plan, options.index_sets, device):
        workload = measured["workloads"][-1]
        print(format_results(workload, measured["records"]), flush=True)
        if options.output is not None:  # also while others are still to come
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps({**described, **measured}, indent=1) + "\n")
    for refusal in measured["refused"]:
        print(" ".join(["refused:", *refusal.values()]), file=sys.stderr)
    return int(any("reason" not in refusal for refusal in measured["refused"]))


if __name__ == "__main__":
    sys.exit(main())
