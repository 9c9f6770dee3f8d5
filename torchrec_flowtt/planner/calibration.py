"""What TT lookups take on one card, fitted to measurements.

``flowtt calibrate`` measures lookups and fits, for each family of kernels,

    us = fixed + lookups * (lookup + column * columns + flop * flops) + parameter * parameters

with no negative coefficient, so that the relative errors are least. Those of an NVIDIA H200 come
with the package.
"""

from __future__ import annotations

import functools
import importlib.resources
import math
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from torchrec_flowtt.planner.kernel_families import Family, lookup_work
from torchrec_flowtt.shapes import TTSpec

Precision = Literal["fp32", "tf32"]
Bags = Literal["single", "pooled"]
Ids = Literal["uniform", "zipf"]
Phase = Literal["forward", "backward"]
Calls = Literal["small", "large"]

# Calls of fewer lookups mostly take the general kernels.
SMALL_CALL = 4_096


class Record(BaseModel):
    """What calibration files are made of: no other fields, and finite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def first_mistake(error: ValidationError) -> str:
    """Where in a file the first mistake is, and what it is."""
    first = error.errors(include_url=False)[0]
    where = "".join(f"{part}: " for part in first["loc"])
    return f"{where}{first['msg']}"


class Measurement(Record):
    """Times of one call.

    Attributes:
        num_embeddings: N.
        embedding_dim: D.
        p_shapes: row factors.
        q_shapes: column factors.
        tt_ranks: inner ranks.
        lookups: of the call.
        pooling_factor: lookups of each bag.
        ids: how ids were distributed.
        precision: of the products.
        forward_us: microseconds of the forward pass.
        backward_us: microseconds of the backward pass with the optimizer's step.
    """

    num_embeddings: int
    embedding_dim: int
    p_shapes: tuple[int, ...]
    q_shapes: tuple[int, ...]
    tt_ranks: tuple[int, ...]
    lookups: int = Field(gt=0)
    pooling_factor: int = Field(ge=1)
    ids: Ids
    precision: Precision
    forward_us: float = Field(gt=0)
    backward_us: float = Field(gt=0)

    @property
    def spec(self) -> TTSpec:
        """The table."""
        return TTSpec(
            self.num_embeddings,
            self.embedding_dim,
            p_shapes=self.p_shapes,
            q_shapes=self.q_shapes,
            tt_ranks=self.tt_ranks,
        )

    def us(self, phase: Phase) -> float:
        """Microseconds of a phase."""
        return self.forward_us if phase == "forward" else self.backward_us


class Coefficients(Record):
    """Those of one kind of lookup, see the module; in microseconds.

    Attributes:
        family: of kernels, see :class:`~torchrec_flowtt.planner.kernel_families.LookupWork`.
        calls: of fewer than ``SMALL_CALL`` lookups, or of more.
        precision: of the products.
        bags: of one lookup each, or of the calibration's ``pooling_factor``.
        ids: how they are distributed.
        phase: the forward pass, or the backward pass with the optimizer's step.
        fixed: of a call.
        lookup: of a lookup.
        column: of a column of a lookup.
        flop: of a multiplication or addition, paddings included.
        parameter: of an element of the cores.
        error: root mean square of the relative errors of the fit.
        points: measurements that it was fitted to.
    """

    family: Family
    calls: Calls
    precision: Precision
    bags: Bags
    ids: Ids
    phase: Phase
    fixed: float = Field(ge=0)
    lookup: float = Field(ge=0)
    column: float = Field(ge=0)
    flop: float = Field(ge=0)
    parameter: float = Field(ge=0)
    error: float = Field(ge=0)
    points: int = Field(gt=0)

    def of_call(self) -> float:
        """Microseconds that all tables of a call share."""
        return self.fixed

    def of_table(self, spec: TTSpec, lookups: float, device: str) -> float:
        """Microseconds of a table's lookups besides."""
        work = lookup_work(spec, device)
        each = self.lookup + self.column * work.columns + self.flop * work.flops
        return lookups * each + self.parameter * spec.num_parameters


class Calibration(Record):
    """Times of TT lookups on one card.

    Attributes:
        card: name of the card, or of the processor.
        device: ``"cuda"`` or ``"cpu"``.
        pooling_factor: lookups of a pooled bag.
        optimizer: whose step is part of the backward pass.
        fbgemm_bytes_per_ms: what FBGEMM's lookup of uncompressed rows moves on the card, indices,
            rows and output; None where it was not measured.
        run: versions, date and command.
        coefficients: of all kinds of lookups.
    """

    format_version: Literal[1] = 1
    card: str
    device: Literal["cuda", "cpu"]
    pooling_factor: int = Field(gt=1)
    optimizer: str
    fbgemm_bytes_per_ms: float | None = Field(default=None, gt=0)
    run: dict[str, str]
    coefficients: tuple[Coefficients, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Calibration:
        phases = {c.phase for c in self.coefficients}
        if len(phases) < 2:
            raise ValueError(f"coefficients must be of both phases, got only {phases}")
        return self

    @classmethod
    def load(cls, path: Path | str) -> Calibration:
        """Reads what ``flowtt calibrate`` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no calibration; says what is wrong first.
        """
        path = Path(path)
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise ValueError(f"{path} is no calibration: {first_mistake(error)}") from error

    def save(self, path: Path | str) -> None:
        """Writes a file for :meth:`load`, a line for each kind of lookup."""
        head = self.model_dump_json(exclude={"coefficients"}).removesuffix("}")
        lines = ",\n".join(c.model_dump_json() for c in self.coefficients)
        Path(path).write_text(f'{head},"coefficients":[\n{lines}\n]}}\n')

    def us(
        self,
        spec: TTSpec,
        lookups: float,
        *,
        phase: Phase,
        precision: Precision = "fp32",
        ids: Ids = "zipf",
        pooling_factor: float = 1.0,
        call_lookups: float = 0.0,
    ) -> float:
        """Microseconds of a table's lookups.

        Args:
            spec: the table.
            lookups: of the table, more than 0.
            phase: forward or backward pass.
            precision: of the products; that of tf32 if only the other was measured, and so on.
            ids: how ids are distributed.
            pooling_factor: average lookups of a bag. Between those measured, times are
                interpolated by its logarithm.
            call_lookups: of all tables of the call. What a call costs whatever its lookups is
                shared out by them.
        """
        together = max(call_lookups, lookups)
        pooled = math.log(max(pooling_factor, 1.0)) / math.log(self.pooling_factor)
        shares: dict[Bags, float] = {"pooled": min(pooled, 1.0)}
        shares["single"] = 1.0 - shares["pooled"]
        logs = 0.0
        for bags, share in shares.items():
            if share > 0.0:
                found = self._find(spec, together, precision, bags, ids, phase)
                us = found.of_table(spec, lookups, self.device)
                us += found.of_call() * lookups / together
                logs += share * math.log(max(us, 1e-3))
        return math.exp(logs)

    def _find(
        self, spec: TTSpec, lookups: float, precision: Precision, bags: Bags, ids: Ids, phase: Phase
    ) -> Coefficients:
        """The kind of lookup that is most alike."""
        family = lookup_work(spec, self.device).family
        calls = "small" if lookups < SMALL_CALL else "large"

        def differences(other: Coefficients) -> tuple[bool, ...]:
            return (
                other.phase != phase,
                other.family != family,
                other.family != "general",
                other.bags != bags,
                other.calls != calls,
                other.precision != precision,
                other.ids != ids,
            )

        return min(self.coefficients, key=differences)


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
