"""What a TT lookup costs beyond moving bytes: the arithmetic of the core products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

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


# One thread group of a server CPU, and one data-centre GPU with general (not tensor-core) kernels.
_DEFAULT_RATES: Mapping[str, ArithmeticRate] = MappingProxyType(
    {
        "cpu": ArithmeticRate(forward=2.0e7, backward=2.0e7),
        "cuda": ArithmeticRate(forward=5.0e9, backward=2.5e9),
    }
)


@dataclass(frozen=True)
class TTLookupCost:
    """Time of the core products of a batch of lookups.

    A lookup multiplies d core slices. Lookups that agree in all but the last index digit share the
    product of the other slices, and the kernels compute it once, so that part is charged for
    ``1 - prefix_sharing`` of the lookups. A backward pass needs the gradient of both factors of
    each product and computes the products again, three times the forward arithmetic.

    Args:
        rates: arithmetic rate by device type.
        prefix_sharing: fraction of lookups, in [0, 1), whose prefix product another lookup of the
            batch computes. 0 (the default) is the worst case; skewed data reach 0.5 to 0.9.

    Example:
        >>> cost = TTLookupCost(rates={"cpu": ArithmeticRate(forward=1e6, backward=1e6)})
        >>> spec = TTSpec(24, 8, p_shapes=(2, 3, 4), q_shapes=(2, 2, 2), tt_ranks=(4, 4))
        >>> cost.flops(spec, lookups=1000) == 1000 * spec.flops_per_lookup
        True
        >>> cost.forward_ms(spec, 1000, "cpu")
        0.192
    """

    rates: Mapping[str, ArithmeticRate] = field(default_factory=lambda: _DEFAULT_RATES)
    prefix_sharing: float = 0.0

    def __post_init__(self) -> None:
        """Check the fields."""
        if not 0.0 <= self.prefix_sharing < 1.0:
            raise ValueError(f"prefix_sharing must be in [0, 1), got {self.prefix_sharing}")

    def flops(self, spec: TTSpec, lookups: float) -> float:
        """FLOP of the forward core products of `lookups` rows of a table."""
        p, r_in, q, r_out = spec.core_shapes[-1]
        last = 2 * (spec.embedding_dim // q) * r_in * q * r_out
        prefix = spec.flops_per_lookup - last
        return lookups * (last + prefix * (1.0 - self.prefix_sharing))

    def forward_ms(self, spec: TTSpec, lookups: float, device: str) -> float:
        """Milliseconds of the forward core products; 0 on a device whose rate is not known."""
        rate = self.rates.get(device)
        return 0.0 if rate is None else self.flops(spec, lookups) / rate.forward

    def backward_ms(self, spec: TTSpec, lookups: float, device: str) -> float:
        """Milliseconds of the backward core products; 0 on a device whose rate is not known."""
        rate = self.rates.get(device)
        return 0.0 if rate is None else 3.0 * self.flops(spec, lookups) / rate.backward
