"""The ``calibrate`` command: times of TT lookups on this machine, for the planner."""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import platform
import random
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import click
import torch
from pydantic import Field, ValidationError
from tqdm import tqdm

from torchrec_flowtt.planner.calibration import (
    Calibration,
    Ids,
    Measurement,
    Phase,
    Record,
    first_mistake,
)
from torchrec_flowtt.planner.coefficient_fit import fit
from torchrec_flowtt.planner.lookup_measurement import (
    CPU_PLAN,
    CUDA_PLAN,
    OPTIMIZER,
    Lookups,
    Plan,
    measure_lookup,
    measure_plan,
)
from torchrec_flowtt.planner.row_bandwidth import fbgemm_bytes_per_ms
from torchrec_flowtt.shapes import TTSpec

_PACKAGES = ("torch", "torchrec-flowtt", "fbgemm-gpu", "fbgemm-gpu-cpu")


class Prediction(NamedTuple):
    """A lookup that was measured, and what the calibration says of it; in microseconds."""

    measured: Measurement
    forward_us: float
    backward_us: float

    def errors(self) -> tuple[float, float]:
        """Predicted over measured, less 1: forward, backward."""
        return (
            self.forward_us / self.measured.forward_us - 1,
            self.backward_us / self.measured.backward_us - 1,
        )


@click.command("calibrate")
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    help="Where to measure; by default the GPU, if there is one.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("calibration.json"),
    show_default=True,
    help="File to write.",
)
@click.option(
    "--measurements",
    "kept",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File for the measurements; if there is one already they are read instead of measured.",
)
@click.option(
    "--check",
    "checks",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="Tables drawn at random whose times are predicted, and then measured.",
)
def calibrate(device: str | None, output: Path, kept: Path | None, checks: int) -> None:
    """Measure TT lookups on this machine, so that the planner can predict them.

    Give the file to the planner:
    FlowTTEmbeddingShardingPlanner(cost=TTLookupCost(calibration=Calibration.load(path))).
    """
    for path in (output, kept):
        if path is not None and not path.parent.is_dir():
            raise click.UsageError(f"there is no folder {path.parent} for {path}")
    if kept is not None and kept.exists():
        measured = read_measurements(kept)
    else:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda" and not torch.cuda.is_available():
            raise click.UsageError("--device cuda needs a GPU that torch can use, and finds none")
        plan = CUDA_PLAN if device == "cuda" else CPU_PLAN
        measured = measure(plan, torch.device(device), checks)
        if kept is not None:
            kept.write_text(measured.model_dump_json() + "\n")
    calibration = fitted(measured)
    calibration.save(output)
    click.echo(f"{calibration.card}: {output}")
    found = predictions(calibration, measured.checks[:checks])
    for prediction in found:
        click.echo(describe(prediction))
    if found:
        click.echo(summary(found))


class Measurements(Record):
    """All that was measured on one machine.

    Attributes:
        card: name of the card, or of the processor.
        device: ``"cuda"`` or ``"cpu"``.
        pooling_factor: lookups of a pooled bag.
        optimizer: whose step is part of the backward pass.
        fbgemm_bytes_per_ms: see :class:`Calibration`.
        run: versions, date and command.
        points: what is fitted.
        checks: tables drawn at random, which are not.
    """

    card: str
    device: Literal["cuda", "cpu"]
    pooling_factor: int
    optimizer: str
    fbgemm_bytes_per_ms: float | None
    run: dict[str, str]
    points: tuple[Measurement, ...] = Field(min_length=1)
    checks: tuple[Measurement, ...]


def read_measurements(path: Path) -> Measurements:
    """What ``--measurements`` wrote.

    Raises:
        click.UsageError: there is something else in the file.
    """
    try:
        return Measurements.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise click.UsageError(
            f"--measurements {path} has no measurements: {first_mistake(error)}"
        ) from error


def measure(plan: Plan, device: torch.device, checks: int) -> Measurements:
    """Measures a plan, and tables drawn at random."""
    with tqdm(total=plan.count() + checks, unit="lookup", disable=None) as bar:
        points = measure_plan(plan, device, bar.update)
        drawn = measure_random_tables(plan, device, checks, bar.update)
    return Measurements(
        card=torch.cuda.get_device_name() if device.type == "cuda" else _processor(),
        device="cuda" if device.type == "cuda" else "cpu",
        pooling_factor=plan.pooling_factor,
        optimizer=OPTIMIZER.value,
        fbgemm_bytes_per_ms=fbgemm_bytes_per_ms(device),
        run=_run(),
        points=tuple(points),
        checks=tuple(drawn),
    )


def fitted(measured: Measurements) -> Calibration:
    """The calibration that measurements make."""
    return Calibration(
        card=measured.card,
        device=measured.device,
        pooling_factor=measured.pooling_factor,
        optimizer=measured.optimizer,
        fbgemm_bytes_per_ms=measured.fbgemm_bytes_per_ms,
        run=measured.run,
        coefficients=fit(measured.points, measured.device),
    )


def measure_random_tables(
    plan: Plan, device: torch.device, count: int, advance: Callable[[], object] = lambda: None
) -> list[Measurement]:
    """Lookups of tables between those of a plan, in at least 256 bags."""
    drawn = random.Random(0)
    lookups: dict[int, Lookups] = {}
    found = []
    for _ in range(count):
        num_cores, (ranks, dims, counts) = drawn.choice(sorted(plan.grids.items()))
        rows = drawn.choice([plan.num_embeddings // 10, plan.num_embeddings])
        columns = [d for d in (16, 32, 48, 64, 96, 128, 192, 256) if dims[0] <= d <= dims[-1]]
        spec = TTSpec.suggest(
            rows,
            drawn.choice(columns),
            num_cores=num_cores,
            tt_ranks=int(math.exp(drawn.uniform(math.log(ranks[0]), math.log(ranks[-1])))),
        )
        length = drawn.choice([1, 5, plan.pooling_factor])
        number = int(math.exp(drawn.uniform(math.log(256 * length), math.log(counts[-1]))))
        ids: Ids = drawn.choice(["uniform", "zipf"])
        precision = drawn.choice(plan.precisions)
        if rows not in lookups:
            lookups[rows] = Lookups(rows, plan.zipf_exponent, device)
        found.append(measure_lookup(spec, lookups[rows], number, ids, length, precision))
        advance()
    return found


def predictions(calibration: Calibration, measured: Iterable[Measurement]) -> list[Prediction]:
    """What a calibration says of lookups that were measured."""
    phases: tuple[Phase, ...] = ("forward", "backward")
    return [
        Prediction(
            m,
            *(
                calibration.us(
                    m.spec,
                    m.lookups,
                    phase=phase,
                    precision=m.precision,
                    ids=m.ids,
                    pooling_factor=m.pooling_factor,
                )
                for phase in phases
            ),
        )
        for m in measured
    ]


def describe(prediction: Prediction) -> str:
    """One line."""
    m = prediction.measured
    forward, backward = prediction.errors()
    return (
        f"{m.num_embeddings:,} x {m.embedding_dim}, q {m.q_shapes}, ranks {m.tt_ranks}, "
        f"{m.lookups:,} lookups ({m.pooling_factor} a bag, {m.ids}, {m.precision}): "
        f"forward {m.forward_us:,.0f} us, predicted {prediction.forward_us:,.0f} ({forward:+.0%}); "
        f"backward {m.backward_us:,.0f}, predicted {prediction.backward_us:,.0f} ({backward:+.0%})"
    )


class Accuracy(NamedTuple):
    """How far the predictions of one phase are from what was measured."""

    median_error: float
    within_30_percent: int


def accuracy(found: list[Prediction]) -> dict[Phase, Accuracy]:
    """Of predictions, at least one, by phase."""
    phases: tuple[Phase, ...] = ("forward", "backward")
    result = {}
    for i, phase in enumerate(phases):
        errors = [abs(prediction.errors()[i]) for prediction in found]
        result[phase] = Accuracy(statistics.median(errors), sum(error <= 0.3 for error in errors))
    return result


def summary(found: list[Prediction]) -> str:
    """The accuracy in words, a line a phase."""
    return "\n".join(
        f"{phase}: median error {of_phase.median_error:.0%}, "
        f"{of_phase.within_30_percent} of {len(found)} within 30%"
        for phase, of_phase in accuracy(found).items()
    )


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown processor"


def _run() -> dict[str, str]:
    found = {
        "command": shlex.join(
            ["flowtt", *(a if a[:1] != "/" else Path(a).name for a in sys.argv[1:])]
        ),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found
