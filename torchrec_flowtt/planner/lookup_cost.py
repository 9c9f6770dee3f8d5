"""What a TT lookup costs: as measured on a card, or by the arithmetic of the core products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from torchrec_flowtt.functional.torch_settings import tf32_allowed
from torchrec_flowtt.planner.calibration import (
    Calibration,
    Ids,
    Phase,
    Precision,
    default_calibration,
)
from torchrec_flowtt.shapes import TTSpec


@dataclass(frozen=True)
class ArithmeticRate:
    """Sustained arithmetic of one device's TT kernels, in FLOP per millisecond.

    Attributes:
        forward: rate of the forward pass.
        backward: rate of the backward pass.
    """

    forward: float
    backward: float

    def __post_init__(self) -> None:
        """Check that the rates are positive."""
        if not (self.forward > 0 and self.backward > 0):
            raise ValueError(f"rates must be positive FLOP/ms, got {self}")


# One thread group of a server CPU, and one data-centre GPU for which nothing was measured.
_DEFAULT_RATES: Mapping[str, ArithmeticRate] = MappingProxyType(
    {
        "cpu": ArithmeticRate(forward=2.0e7, backward=2.0e7),
        "cuda": ArithmeticRate(forward=5.0e9, backward=2.5e9),
    }
)


@dataclass(frozen=True)
class LookupLoad:
    """The lookups of one table that a rank does in a batch.

    Attributes:
        lookups: of the table.
        pooling_factor: average lookups of a bag.
        call_lookups: of all tables that are looked up with it, the table's own if less. They share
            launches, so that a table costs less in company.
    """

    lookups: float
    pooling_factor: float = 1.0
    call_lookups: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        for name in ("lookups", "pooling_factor", "call_lookups"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {value}")


@dataclass(frozen=True)
class TTLookupCost:
    """Time of a batch of lookups.

    On a device with a calibration, times are those that were fitted to measurements. Elsewhere they
    are at least those of the arithmetic: a lookup multiplies d core slices. Lookups that agree in
    all but the last index digit share the product of the other slices, and the kernels compute it
    once, so that part is charged for ``1 - prefix_sharing`` of the lookups. A backward pass needs
    the gradient of both factors of each product and computes the products again, three times the
    forward arithmetic.

    Args:
        rates: arithmetic rate by device type.
        prefix_sharing: fraction of lookups, in [0, 1), whose prefix product another lookup of the
            batch computes. 0 (the default) is the worst case; skewed data reach 0.5 to 0.9. A
            calibration has measured it for both kinds of `ids`.
        calibration: times measured on the devices planned for.
        ids: how ids are distributed: ``"zipf"``, as in recommendation, or ``"uniform"``.
        precision: of the products; default: what torch allows when the cost is asked for.

    Example:
        >>> cost = TTLookupCost(rates={"cpu": ArithmeticRate(forward=1e6, backward=1e6)})
        >>> spec = TTSpec(24, 8, p_shapes=(2, 3, 4), q_shapes=(2, 2, 2), tt_ranks=(4, 4))
        >>> cost.flops(spec, lookups=1000) == 1000 * spec.flops_per_lookup
        True
        >>> cost.forward_ms(spec, LookupLoad(1000), "cpu")
        0.192
    """

    rates: Mapping[str, ArithmeticRate] = field(default_factory=lambda: _DEFAULT_RATES)
    prefix_sharing: float = 0.0
    calibration: Calibration | None = None
    ids: Ids = "zipf"
    precision: Precision | None = None

    def __post_init__(self) -> None:
        """Check the fields."""
        if not isinstance(self.rates, Mapping):
            raise TypeError(
                "rates must be a mapping of device types to ArithmeticRate, got "
                f"{type(self.rates).__name__}"
            )
        if not 0.0 <= self.prefix_sharing < 1.0:
            raise ValueError(f"prefix_sharing must be in [0, 1), got {self.prefix_sharing}")
        if self.calibration is not None and not isinstance(self.calibration, Calibration):
            raise TypeError(
                "calibration must be a Calibration, such as Calibration.load(path) returns, got "
                f"{type(self.calibration).__name__}"
            )
        if self.ids not in ("uniform", "zipf"):
            raise ValueError(f"ids must be 'uniform' or 'zipf', got {self.ids!r}")
        if self.precision not in (None, "fp32", "tf32"):
            raise ValueError(f"precision must be None, 'fp32' or 'tf32', got {self.precision!r}")

    @classmethod
    def default(cls, device: str) -> TTLookupCost:
        """With the calibration that the package has for `device`, a device type."""
        return cls(calibration=default_calibration(device))

    def is_measured(self, device: str) -> bool:
        """Whether times on `device` come from a calibration, and include all that a lookup does."""
        return self.calibration is not None and self.calibration.device == device

    def flops(self, spec: TTSpec, lookups: float) -> float:
        """FLOP of the forward core products of `lookups` rows of a table."""
        p, r_in, q, r_out = spec.core_shapes[-1]
        last = 2 * (spec.embedding_dim // q) * r_in * q * r_out
        prefix = spec.flops_per_lookup - last
        return lookups * (last + prefix * (1.0 - self.prefix_sharing))

    def forward_ms(self, spec: TTSpec, load: LookupLoad, device: str) -> float:
        """Milliseconds of the forward pass; 0 on a device of which nothing is known."""
        if self.is_measured(device):
            return self._measured_ms(spec, load, "forward")
        rate = self.rates.get(device)
        return 0.0 if rate is None else self.flops(spec, load.lookups) / rate.forward

    def backward_ms(self, spec: TTSpec, load: LookupLoad, device: str) -> float:
        """Milliseconds of the backward pass; 0 on a device of which nothing is known."""
        if self.is_measured(device):
            return self._measured_ms(spec, load, "backward")
        rate = self.rates.get(device)
        return 0.0 if rate is None else 3.0 * self.flops(spec, load.lookups) / rate.backward

    def _measured_ms(self, spec: TTSpec, load: LookupLoad, phase: Phase) -> float:
        assert self.calibration is not None
        if load.lookups <= 0:
            return 0.0
        precision = self.precision or ("tf32" if tf32_allowed() else "fp32")
        us = self.calibration.us(
            spec,
            load.lookups,
            phase=phase,
            precision=precision,
            ids=self.ids,
            pooling_factor=load.pooling_factor,
            call_lookups=load.call_lookups,
        )
        return us / 1e3
