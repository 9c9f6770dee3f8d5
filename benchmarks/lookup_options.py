"""Command-line options that the lookup benchmarks share."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from lookup_measurement import Plan
from lookup_modes import MODES, select_modes
from lookup_workloads import WORKLOADS, Workload

_FIELDS = {field.name: field for field in dataclasses.fields(Workload) if field.name != "name"}
_TUPLES = ("p_shapes", "q_shapes", "tt_ranks")


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


def workload_argument(text: str) -> Workload:
    """:func:`parse_workload` for argparse, which hides the message of other errors."""
    try:
        return parse_workload(text)
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _contender(text: str) -> str:
    try:
        select_modes([text])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def at_least(least: int) -> Callable[[str], int]:
    """Type of an integer option for argparse."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {text}")
        return int(text)

    return number


def add_measurement_options(
    parser: argparse.ArgumentParser, contenders: tuple[str, ...], index_sets: int, repetitions: int
) -> None:
    """What every lookup benchmark can be told about how it measures."""
    parser.add_argument(
        "--contenders",
        type=_contender,
        nargs="+",
        default=contenders,
        help=f"of {', '.join(MODES)}",
    )
    parser.add_argument("--repetitions", type=at_least(2), default=repetitions)
    parser.add_argument(
        "--index-sets", type=at_least(1), default=index_sets, help="batches that take turns"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, help="JSON file to write")


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """An option for every field of a workload."""
    shape = parser.add_argument_group("changes to the workloads")
    for name, field in _FIELDS.items():
        option = "--" + name.replace("_", "-")
        if name in _TUPLES:
            shape.add_argument(option, type=int, nargs="+")
        elif isinstance(field.default, bool):
            shape.add_argument(option, action="store_true", default=None)
        else:
            shape.add_argument(option, type=type(field.default))


def changed_shape(options: argparse.Namespace) -> dict[str, object]:
    """The fields that :func:`add_shape_options` were used for."""
    return {
        name: tuple(value) if name in _TUPLES else value
        for name in _FIELDS
        if (value := getattr(options, name)) is not None
    }


def varied(workload: Workload, changes: dict[str, object]) -> Workload:
    """The workload with the changes of the command line; ends the program if there is none such."""
    try:
        return workload.variant(**changes)
    except (ValueError, TypeError) as error:
        raise SystemExit(f"workload {workload.name}: {error}") from None


def warm_plan(
    options: argparse.Namespace, sampled_lookups: int, phases: Sequence[str] = ("forward",)
) -> Plan:
    """Passes with a warm cache, one and several to a CUDA graph."""
    return Plan(
        phases=tuple(phases),
        timings=("graph", "chain"),
        colds=(False,),
        repetitions=options.repetitions,
        sampled_lookups=sampled_lookups,
    )


def chosen_device(options: argparse.Namespace) -> torch.device:
    """With the number of the current one."""
    if options.device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("no GPU: give --device cpu for a run that shows no device times")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(options.device)
