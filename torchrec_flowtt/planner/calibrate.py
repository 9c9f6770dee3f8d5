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
from pathlib import Path
from typing import NamedTuple

import click
import torch
from tqdm import tqdm

from torchrec_flowtt.planner.calibration import Calibration, Ids, Precision
from torchrec_flowtt.planner.lookup_measurement import (
    CPU_PLAN,
    CUDA_PLAN,
    OPTIMIZER,
    Lookups,
    Plan,
    lookup_us,
    measure_grids,
)
from torchrec_flowtt.planner.row_bandwidth import fbgemm_bytes_per_ms
from torchrec_flowtt.shapes import TTSpec

_PACKAGES = ("torch", "torchrec-flowtt", "fbgemm-gpu", "fbgemm-gpu-cpu")


class Prediction(NamedTuple):
    """A table that no grid has, predicted and measured; in microseconds."""

    spec: TTSpec
    lookups: int
    pooling_factor: int
    ids: Ids
    precision: Precision
    predicted: tuple[float, float]  # forward, backward
    measured: tuple[float, float]

    def errors(self) -> tuple[float, float]:
        """Predicted over measured, less 1: forward, backward."""
        forward, backward = zip(self.predicted, self.measured, strict=True)
        return forward[0] / forward[1] - 1, backward[0] / backward[1] - 1


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
    "--check",
    "checks",
    type=click.IntRange(min=0),
    default=20,
    show_default=True,
    help="Tables drawn at random whose times are predicted, and then measured.",
)
def calibrate(device: str | None, output: Path, checks: int) -> None:
    """Measure TT lookups on this machine, so that the planner can predict them.

    Give the file to the planner:
    FlowTTEmbeddingShardingPlanner(cost=TTLookupCost(calibration=Calibration.load(path))).
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("--device cuda needs a GPU that torch can use; this torch has none")
    if not output.parent.is_dir():
        raise click.UsageError(f"--output {output}: there is no folder {output.parent}")
    plan = CUDA_PLAN if device == "cuda" else CPU_PLAN
    calibration = measure(plan, torch.device(device))
    output.write_text(calibration.model_dump_json(indent=1) + "\n")
    click.echo(f"{calibration.card}: {output}")
    found = predictions(calibration, checks)
    for prediction in found:
        click.echo(describe(prediction))
    if found:
        click.echo(summary(found))


def measure(plan: Plan, device: torch.device) -> Calibration:
    """Measures all that a calibration has."""
    with tqdm(total=plan.count(), unit="lookup", disable=None) as bar:
        grids = measure_grids(plan, device, bar.update)
    return Calibration(
        card=torch.cuda.get_device_name() if device.type == "cuda" else _processor(),
        device="cuda" if device.type == "cuda" else "cpu",
        num_embeddings=plan.num_embeddings,
        pooling_factor=plan.pooling_factor,
        zipf_exponent=plan.zipf_exponent,
        optimizer=OPTIMIZER.value,
        fbgemm_bytes_per_ms=fbgemm_bytes_per_ms(device),
        run=_run(),
        grids=grids,
    )


def predictions(calibration: Calibration, count: int, seed: int = 0) -> list[Prediction]:
    """Tables drawn at random, on the calibration's device."""
    drawn = random.Random(seed)
    device = torch.device(calibration.device)
    lookups: dict[int, Lookups] = {}
    most = max(calibration.grids[0].lookups)
    found = []
    for _ in range(count):
        grid = drawn.choice(calibration.grids)
        rows = drawn.choice([1_000_000, 10_000_000, 30_000_000])
        dims = [d for d in (16, 32, 48, 64, 96, 128, 192, 256) if d <= grid.embedding_dims[-1]]
        spec = TTSpec.suggest(
            rows,
            drawn.choice([d for d in dims if d >= grid.embedding_dims[0]]),
            num_cores=grid.num_cores,
            tt_ranks=int(math.exp(drawn.uniform(*map(math.log, _ends(grid.tt_ranks))))),
        )
        number = int(math.exp(drawn.uniform(*map(math.log, _ends(grid.lookups)))))
        length = drawn.choice([1, 5, calibration.pooling_factor, 50])
        ids: Ids = drawn.choice(["uniform", "zipf"])
        precision = drawn.choice(sorted({t.precision for t in grid.times}))
        if rows not in lookups:
            lookups[rows] = Lookups(rows, calibration.zipf_exponent, device)
        batch = lookups[rows].draw(most, ids)[:number]
        forward, backward = (
            calibration.us(
                spec, number, phase=phase, precision=precision, ids=ids, pooling_factor=length
            )
            for phase in ("forward", "backward")
        )
        measured = lookup_us(spec, batch, length, precision)
        found.append(
            Prediction(spec, number, length, ids, precision, (forward, backward), measured)
        )
    return found


def describe(prediction: Prediction) -> str:
    """One line."""
    spec = prediction.spec
    errors = prediction.errors()
    parts = [
        f"{name} {measured:,.0f} us, predicted {predicted:,.0f} ({error:+.0%})"
        for name, measured, predicted, error in zip(
            ("forward", "backward"),
            prediction.measured,
            prediction.predicted,
            errors,
            strict=True,
        )
    ]
    return (
        f"{spec.num_embeddings:,} x {spec.embedding_dim}, ranks {spec.tt_ranks}, "
        f"{prediction.lookups:,} lookups ({prediction.pooling_factor} a bag, {prediction.ids}, "
        f"{prediction.precision}): " + "; ".join(parts)
    )


def summary(found: list[Prediction]) -> str:
    """How far the predictions are from what was measured."""
    lines = []
    for i, phase in enumerate(("forward", "backward")):
        errors = sorted(abs(prediction.errors()[i]) for prediction in found)
        within = sum(error <= 0.3 for error in errors)
        lines.append(
            f"{phase}: median error {statistics.median(errors):.0%}, "
            f"{within} of {len(errors)} within 30%"
        )
    return "\n".join(lines)


def _ends(axis: tuple[int, ...]) -> tuple[int, int]:
    return axis[0], axis[-1]


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown processor"


def _run() -> dict[str, str]:
    found = {
        "command": shlex.join(["flowtt", *sys.argv[1:]]),
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
