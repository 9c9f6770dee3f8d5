"""Measured times of TT lookups on one card, and what they say of other lookups.

``flowtt calibrate`` measures them; those of an NVIDIA H200 come with the package. Times lie on
grids of ranks, columns and lookups, one for each number of cores. Between the points they are
interpolated, linearly in the logarithms: a kernel's time is a power of each of these, piece by
piece.
"""

from __future__ import annotations

import functools
import importlib.resources
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from torchrec_flowtt.shapes import TTSpec

Precision = Literal["fp32", "tf32"]
Bags = Literal["single", "pooled"]
Ids = Literal["uniform", "zipf"]
Phase = Literal["forward", "backward"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GridTimes(_Record):
    """Times on a grid, of one kind of lookup.

    Attributes:
        precision: of fp32 cores: ``"fp32"``, or ``"tf32"`` where PyTorch allows it.
        bags: of one lookup each, or of the calibration's ``pooling_factor``.
        ids: how they are distributed.
        phase: the forward pass, or the backward pass with the optimizer's step.
        us: microseconds, ``[len(tt_ranks), len(embedding_dims), len(lookups)]``.
    """

    precision: Precision
    bags: Bags
    ids: Ids
    phase: Phase
    us: tuple[tuple[tuple[float, ...], ...], ...]


class Grid(_Record):
    """Tables of one number of cores, and their times.

    Attributes:
        num_cores: TT-cores of a table.
        tt_ranks: of all inner bonds alike, ascending.
        embedding_dims: columns, ascending.
        lookups: of a call, ascending.
        times: one for each kind of lookup.
    """

    num_cores: int = Field(ge=2, le=4)
    tt_ranks: tuple[int, ...] = Field(min_length=1)
    embedding_dims: tuple[int, ...] = Field(min_length=1)
    lookups: tuple[int, ...] = Field(min_length=1)
    times: tuple[GridTimes, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Grid:
        axes = (self.tt_ranks, self.embedding_dims, self.lookups)
        for name, axis in zip(("tt_ranks", "embedding_dims", "lookups"), axes, strict=True):
            if axis[0] <= 0 or any(a >= b for a, b in zip(axis, axis[1:], strict=False)):
                raise ValueError(f"{name} must be positive and ascend, got {list(axis)}")
        shape = tuple(map(len, axes))
        for times in self.times:
            array = np.array(times.us, dtype=object)
            if array.shape != shape:
                raise ValueError(f"us must have the shape of its grid, {shape}, got {array.shape}")
            if not (np.isfinite(array.astype(float)).all() and (array.astype(float) > 0).all()):
                raise ValueError("us must be positive and finite")
        return self


class Calibration(_Record):
    """Times of TT lookups on one card.

    Attributes:
        card: name of the card, or of the processor.
        device: ``"cuda"`` or ``"cpu"``.
        num_embeddings: rows of every table that was measured.
        pooling_factor: lookups of a pooled bag.
        zipf_exponent: of the skewed ids.
        optimizer: whose step is part of the backward pass.
        fbgemm_bytes_per_ms: what FBGEMM's lookup of uncompressed rows moves on the card, indices,
            rows and output; None where it was not measured.
        run: versions, date and command.
        grids: the times.
    """

    format_version: Literal[1] = 1
    card: str
    device: Literal["cuda", "cpu"]
    num_embeddings: int = Field(gt=0)
    pooling_factor: int = Field(gt=1)
    zipf_exponent: float
    optimizer: str
    fbgemm_bytes_per_ms: float | None = None
    run: dict[str, str]
    grids: tuple[Grid, ...] = Field(min_length=1)

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Reads what ``flowtt calibrate`` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no calibration; says what is wrong first.
        """
        try:
            return cls.model_validate_json(path.read_text())
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{path} is no calibration: {where}: {first['msg']}") from error

    def us(
        self,
        spec: TTSpec,
        lookups: float,
        *,
        phase: Phase,
        precision: Precision = "fp32",
        ids: Ids = "zipf",
        pooling_factor: float = 1.0,
    ) -> float:
        """Microseconds of one call.

        Beyond the grid a time grows with the arithmetic of a lookup, and with the number of
        lookups; below it, it stays.

        Args:
            spec: the table; of different ranks the geometric mean counts.
            lookups: of the call, more than 0.
            phase: forward or backward pass.
            precision: of the products.
            ids: how ids are distributed.
            pooling_factor: average lookups of a bag.

        Raises:
            ValueError: the calibration has no times of such lookups.
        """
        grid = next((g for g in self.grids if g.num_cores == spec.num_cores), None)
        if grid is None:
            raise ValueError(
                f"the calibration of {self.card} has no tables of {spec.num_cores} cores"
            )
        weight = math.log(max(pooling_factor, 1.0)) / math.log(self.pooling_factor)
        weight = min(weight, 1.0)
        logs = 0.0
        for bags, share in (("single", 1.0 - weight), ("pooled", weight)):
            if share > 0.0:
                times = _find(self.card, grid, precision, bags, ids, phase)
                logs += share * _interpolated(grid, times, spec, lookups)
        return math.exp(logs)


def _find(
    card: str, grid: Grid, precision: Precision, bags: str, ids: Ids, phase: Phase
) -> GridTimes:
    wanted = (precision, bags, ids, phase)
    for times in grid.times:
        if (times.precision, times.bags, times.ids, times.phase) == wanted:
            return times
    raise ValueError(f"the calibration of {card} has no times of {' '.join(wanted)}")


def _interpolated(grid: Grid, times: GridTimes, spec: TTSpec, lookups: float) -> float:
    """The logarithm of the microseconds."""
    rank = math.exp(sum(map(math.log, spec.tt_ranks)) / len(spec.tt_ranks))
    values = np.log(np.array(times.us))
    for coordinate, axis in (
        (lookups, grid.lookups),
        (spec.embedding_dim, grid.embedding_dims),
        (rank, grid.tt_ranks),
    ):
        values = _along_last(values, axis, coordinate)
    beyond = max(lookups / grid.lookups[-1], 1.0)
    beyond *= max(spec.embedding_dim / grid.embedding_dims[-1], 1.0)
    beyond *= max(rank / grid.tt_ranks[-1], 1.0) ** (1 if spec.num_cores == 2 else 2)
    return float(values) + math.log(beyond)


def _along_last(values: np.ndarray, axis: Sequence[int], coordinate: float) -> np.ndarray:
    points = np.log(axis)
    return np.apply_along_axis(lambda v: np.interp(math.log(coordinate), points, v), -1, values)


@functools.cache
def packaged_calibrations() -> dict[str, Calibration]:
    """Those that come with the package, by card."""
    folder = importlib.resources.files("torchrec_flowtt.planner") / "calibrations"
    found = (
        Calibration.model_validate_json(file.read_text())
        for file in folder.iterdir()
        if file.name.endswith(".json")
    )
    return {calibration.card: calibration for calibration in found}


DEFAULT_CARD = "NVIDIA H200"


def default_calibration(device: str) -> Calibration | None:
    """The packaged calibration of this machine's card, that of an H200 if there is none.

    Args:
        device: type of the devices planned for. Only cards have one: processors differ too much.
    """
    if device != "cuda":
        return None
    found = packaged_calibrations()
    if torch.cuda.is_available():
        card = torch.cuda.get_device_name()
        if card in found:
            return found[card]
    return found.get(DEFAULT_CARD)
