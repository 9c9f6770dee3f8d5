"""What each mechanism of the CUDA forward is worth: TT lookups with one or all of them off.

    python benchmarks/lookup_ablation.py --output docs/performance/h200/ablation.json

The mechanisms are switched by ``FLOWTT_CUDA_DISABLE`` (docs/kernels.md says what each is). Every
variant is checked against float64 before it is timed: forward passes with a warm cache in CUDA
graphs, in tf32 (one product) and with fp32 accuracy (three).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence

import torch
from lookup_measurement import Record
from lookup_modes import DISABLE_VARIABLE, MECHANISMS, Mode, disabled_mechanisms, select_modes
from lookup_options import (
    add_measurement_options,
    chosen_device,
    warm_plan,
    workload_argument,
)
from lookup_records import add_ratios, write_records
from lookup_report import format_results
from lookup_run import Runner
from lookup_workloads import WORKLOADS, Workload

_WORKLOADS = (
    *(WORKLOADS[name] for name in ("W1", "W2p", "W1-skew", "W3p", "W6p")),
    # Long prefix products, which are worth a checkpoint.
    WORKLOADS["W1"].variant(tt_ranks=(128, 128)),
    WORKLOADS["W1-skew"].variant(tt_ranks=(128, 128)),
)
_VARIANTS = ("none", *MECHANISMS, "all")
_SAMPLED_LOOKUPS = 2048


def without(mode: Mode, variant: str) -> Mode:
    """The mode with mechanisms off: names separated by commas, "all" or "none"."""
    named = {"none": (), "all": MECHANISMS}
    mechanisms = named.get(variant, variant.split(","))

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        with mode.settings(), disabled_mechanisms(mechanisms):
            yield

    return dataclasses.replace(mode, settings=settings)


def switches_are_read(device: torch.device) -> bool:
    """Whether the library refuses a mechanism that does not exist; one without switches does not.

    On the CPU there is nothing to switch.
    """
    if device.type == "cpu":
        return True
    from torchrec_flowtt import FlowTTEmbeddingBag

    module = FlowTTEmbeddingBag(1000, 128, tt_ranks=32, q_shapes=(4, 4, 8), device=device)
    ids = torch.arange(4096, device=device) % 1000
    with disabled_mechanisms(["no such mechanism"]):
        try:
            module(ids, torch.arange(ids.numel(), device=device))
        except (RuntimeError, ValueError):
            return True
    return False


def measure(
    runner: Runner, workload: Workload, modes: Sequence[Mode], variants: Sequence[str]
) -> list[Record]:
    """Records of a workload; ``disabled`` names what was off, ``ratio_to_all_on`` what it cost."""
    disabled = {without(mode, variant): variant for mode in modes for variant in variants}
    records = [
        {**record, "disabled": disabled[mode]}
        for mode, record in runner.measure(workload, list(disabled))
    ]
    add_ratios(records)
    settings = ("contender", "precision", "timing")
    all_on = {
        tuple(record[key] for key in settings): record["p50_us"]
        for record in records
        if record["disabled"] == "none"
    }
    for record in records:
        base, median = all_on.get(tuple(record[key] for key in settings)), record["p50_us"]
        record["ratio_to_all_on"] = median and base and round(median / base, 3)
    return records


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Without options: the published ablation on the GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workloads",
        type=workload_argument,
        nargs="+",
        default=_WORKLOADS,
        metavar="NAME[:key=value]",
    )
    parser.add_argument(
        "--disable",
        nargs="+",
        default=_VARIANTS,
        metavar="WORDS",
        help='variants: what is off in each, separated by commas, "all" or "none"',
    )
    add_measurement_options(parser, ("flowtt/tf32", "flowtt/fp32"), index_sets=4, repetitions=32)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the ablation from the command line; 1 if a variant was wrong or failed."""
    options = parse_arguments(arguments)
    device = chosen_device(options)
    if not switches_are_read(device):
        print(f"the kernels ignore {DISABLE_VARIABLE}: nothing to compare", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    runner = Runner(warm_plan(options, _SAMPLED_LOOKUPS), options.index_sets, device)
    modes = select_modes(options.contenders)
    records: list[Record] = []
    for workload in options.workloads:
        measured = measure(runner, workload, modes, options.disable)
        records += measured
        print(format_results(workload.name, measured), flush=True)
        if options.output is not None:
            write_records(options.output, records)
    return int(runner.failed)


if __name__ == "__main__":
    sys.exit(main())
