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
import sys
from collections.abc import Sequence

import torch
from lookup_measurement import Plan, Record
from lookup_modes import DEFAULT_MODES, PHASES, select_modes
from lookup_options import (
    add_measurement_options,
    add_shape_options,
    changed_shape,
    chosen_device,
    varied,
    workload_argument,
)
from lookup_records import add_ratios, write_records
from lookup_report import format_results
from lookup_run import Runner
from lookup_workloads import WORKLOADS


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Without options: all named workloads and the default contenders on the GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workloads", type=workload_argument, nargs="+", metavar="NAME[:key=value]"
    )
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    ways = ("events", "graph", "chain")
    parser.add_argument("--timings", nargs="+", choices=ways, default=ways)
    parser.add_argument("--caches", nargs="+", choices=("warm", "cold"), default=("warm", "cold"))
    add_measurement_options(parser, DEFAULT_MODES, index_sets=8, repetitions=64)
    add_shape_options(parser)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark from the command line; 1 if a contender was wrong or failed."""
    options = parse_arguments(arguments)
    changes = changed_shape(options)
    workloads = [varied(workload, changes) for workload in options.workloads or WORKLOADS.values()]
    plan = Plan(
        phases=options.phases,
        timings=options.timings,
        colds=[cache == "cold" for cache in options.caches],
        repetitions=options.repetitions,
    )
    torch.manual_seed(0)
    runner = Runner(plan, options.index_sets, chosen_device(options))
    modes = select_modes(options.contenders)
    records: list[Record] = []
    for workload in workloads:
        records += [record for _, record in runner.measure(workload, modes)]
        add_ratios(records)
        print(format_results(workload.name, records), flush=True)
        if options.output is not None:  # also while others are still to come
            write_records(options.output, records)
    return int(runner.failed)


if __name__ == "__main__":
    sys.exit(main())
