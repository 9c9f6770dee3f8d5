"""Optimizers that can be fused into the backward pass, under FBGEMM's names."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers

import torch

__all__ = ["OptimType", "OptimizerConfig"]


class OptimType(str, enum.Enum):
    """Optimizer of a TT table; values are those of FBGEMM's ``EmbOptimType``.

    ``OptimType(value)`` takes a value as a string, or an enum member that has such a value, so
    FBGEMM's own members are accepted without FBGEMM being imported here.

    >>> OptimType("exact_row_wise_adagrad").num_moments
    1
    >>> OptimType("rmsprop")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    ValueError: optimizer must be one of 'exact_sgd', ..., got 'rmsprop'
    """

    EXACT_SGD = "exact_sgd"
    """``w -= lr * g``."""
    EXACT_ADAGRAD = "exact_adagrad"
    """``m1 += g^2; w -= lr * g / (sqrt(m1) + eps)``, element by element."""
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    """``m1 += mean(g^2); w -= lr * g / (sqrt(m1) + eps)``, one m1 for each core slice."""
    ADAM = "adam"
    """Adam with bias correction and decoupled weight decay, on the slices looked up."""
    NONE = "none"
    """Gradients of the cores are returned, for any torch optimizer."""

    @classmethod
    def _missing_(cls, value: object) -> OptimType:
        plain = value.value if isinstance(value, enum.Enum) else value
        for member in cls:
            if member.value == plain:
                return member
        valid = ", ".join(repr(member.value) for member in cls)
        raise ValueError(f"optimizer must be one of {valid}, got {plain!r}")

    def __str__(self) -> str:
        """The value, as FBGEMM's enum."""
        return str(self.value)

    @property
    def num_moments(self) -> int:
        """How many state tensors each core has: ``momentum1``, ``momentum2``."""
        if self is OptimType.ADAM:
            return 2
        return int(self in (OptimType.EXACT_ADAGRAD, OptimType.EXACT_ROWWISE_ADAGRAD))


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer and its hyper-parameters, with the names and defaults of FBGEMM's TBE.

    Args:
        optimizer: the optimizer; a string or one of FBGEMM's members is converted.
        learning_rate: step size, at least 0.
        eps: added to the denominator of Adagrad and Adam, at least 0.
        beta1: decay of Adam's first moment, in [0, 1).
        beta2: decay of Adam's second moment, in [0, 1).
        weight_decay: decoupled weight decay, at least 0. TBE applies one to Adam only (its other
            optimizers here ignore the argument by default), so any other optimizer refuses it.
        stochastic_rounding: of fp16 and bf16 cores on CUDA, which round a stepped value up or down
            at random, so that steps smaller than the distance of two values are not lost.
        gradient_clipping: whether every element of the gradient of the pooled output is brought
            into ``[-max_gradient, max_gradient]`` first. Not for ``"none"``, which has no step.
        max_gradient: at least 0; without effect unless `gradient_clipping` is set.

    Raises:
        TypeError: a hyper-parameter is no real number, or a switch no bool.
        ValueError: the optimizer is unknown, or a hyper-parameter is out of range, which ends at
            the largest float32.

    >>> OptimizerConfig("adam", learning_rate=0.1).optimizer
    <OptimType.ADAM: 'adam'>
    """

    optimizer: OptimType = OptimType.EXACT_SGD
    learning_rate: float = 0.01
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    stochastic_rounding: bool = True
    gradient_clipping: bool = False
    max_gradient: float = 1.0

    def __post_init__(self) -> None:
        """Converts and validates."""
        object.__setattr__(self, "optimizer", OptimType(self.optimizer))
        for switch in ("stochastic_rounding", "gradient_clipping"):
            if not isinstance(getattr(self, switch), bool):
                raise TypeError(f"{switch} must be True or False, got {getattr(self, switch)!r}")
        for argument in ("learning_rate", "eps", "beta1", "beta2", "weight_decay", "max_gradient"):
            value = getattr(self, argument)
            if isinstance(value, bool) or not isinstance(value, numbers.Real):
                kind = type(value).__name__
                raise TypeError(f"{argument} must be a real number, got {value!r} ({kind})")
            number = _as_float(value)
            if argument in ("beta1", "beta2"):
                is_valid, limit = 0.0 <= number < 1.0, "in [0, 1)"
            else:
                is_valid = 0.0 <= number <= _LARGEST
                limit = f"finite and at least 0, and fit float32 (at most {_LARGEST:.8g})"
            if not is_valid:
                raise ValueError(f"{argument} must be {limit}, got {number}")
            object.__setattr__(self, argument, number)
        if self.gradient_clipping and self.optimizer is OptimType.NONE:
            raise ValueError(
                "gradient_clipping must be False for optimizer 'none', whose gradients torch's own "
                "optimizers and torch.nn.utils.clip_grad_value_ handle"
            )
        if self.weight_decay and self.optimizer is not OptimType.ADAM:
            raise ValueError(
                f"weight_decay must be 0 for optimizer {self.optimizer.value!r}, which has none "
                f"(as in FBGEMM's TBE), got {self.weight_decay}"
            )


# The kernels compute in float32, and the learning rate is a float32 tensor.
_LARGEST = torch.finfo(torch.float32).max


def _as_float(value: numbers.Real) -> float:
    """Infinity for what float64 cannot represent either, whatever its sign."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
