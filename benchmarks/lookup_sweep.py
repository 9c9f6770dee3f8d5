"""TT lookups over ranks, columns, numbers of cores and batch sizes, beside their computed floors.

    python benchmarks/lookup_sweep.py --output docs/performance/h200/sweep.json

Everything varies one property of a workload (``--workload``, W1 unless said otherwise) and leaves
the others. Contenders are checked against float64 before they are timed. FBGEMM's uncompressed
tables are there where they can differ: over columns and batch sizes. Forward passes and training
steps with a warm cache in CUDA graphs; `benchmarks/lookup.py` has cold caches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from lookup_measurement import Record
from lookup_modes import PHASES, select_modes
from lookup_options import (
    add_measurement_options,
    chosen_device,
    varied,
    warm_plan,
    workload_argument,
)
from lookup_records import add_ratios, write_records
from lookup_report import format_results
from lookup_run import Runner
from lookup_workloads import WORKLOADS, Workload

_CONTENDERS = (
    "flowtt/fp32",
    "flowtt/tf32",
    "flowtt/bf16",
    "fbgemm/fp32",
    "fbgemm_no_check/fp32",
)
_SWEEPS_WITH_FBGEMM = ("columns", "batch")
_SAMPLED_LOOKUPS = 2048


def sweep_points(base: Workload, options: argparse.Namespace) -> dict[Workload, Record]:
    """The workloads, each with its value in the sweeps that it belongs to."""
    cores = len(base.tt_ranks) + 1
    variants = [
        *(("ranks", rank, {"tt_ranks": (rank,) * (cores - 1)}) for rank in options.ranks),
        *(("columns", columns, {"embedding_dim": columns}) for columns in options.columns),
        *(
            ("cores", number, {"tt_ranks": (base.tt_ranks[0],) * (number - 1)})
            for number in options.cores
        ),
        *(("batch", size, {"batch_size": size}) for size in options.batch_sizes),
    ]
    points: dict[Workload, Record] = {}
    for sweep, value, changes in variants:
        points.setdefault(varied(base, changes), {})[sweep] = value
    return points


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Without options: the published sweeps on the GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workload", type=workload_argument, default=WORKLOADS["W1"], metavar="NAME[:key=value]")
    add("--ranks", type=int, nargs="*", default=[8, 16, 24, 32, 48, 64, 96, 128])
    add("--columns", type=int, nargs="*", default=[16, 32, 64, 128, 256])
    add("--cores", type=int, nargs="*", default=[2, 3, 4])
    add("--batch-sizes", type=int, nargs="*", default=[4**power for power in range(4, 11)])
    add("--phases", nargs="+", choices=PHASES, default=PHASES)
    add_measurement_options(parser, _CONTENDERS, index_sets=4, repetitions=32)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sweeps from the command line; 1 if a contender was wrong or failed."""
    options = parse_arguments(arguments)
    torch.manual_seed(0)
    plan = warm_plan(options, _SAMPLED_LOOKUPS, options.phases)
    runner = Runner(plan, options.index_sets, chosen_device(options))
    modes = select_modes(options.contenders)
    records: list[Record] = []
    for workload, sweeps in sweep_points(options.workload, options).items():
        with_fbgemm = any(sweep in _SWEEPS_WITH_FBGEMM for sweep in sweeps)
        chosen = [mode for mode in modes if mode.is_tensor_train or with_fbgemm]
        records += [{**record, "sweeps": sweeps} for _, record in runner.measure(workload, chosen)]
        add_ratios(records)
        print(format_results(workload.name, records), flush=True)
        if options.output is not None:
            write_records(options.output, records)
    return int(runner.failed)


if __name__ == "__main__":
    sys.exit(main())
