"""The optimizers that the lookup benchmarks train with, and what their first step does."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

# By the names that the modules take: what a contender's name has at its end.
CONTENDER_SUFFIXES = {
    "exact_sgd": "",
    "exact_adagrad": "_adagrad",
    "exact_row_wise_adagrad": "_row_wise_adagrad",
    "adam": "_adam",
}

LEARNING_RATE = 1e-4
EPS = 1e-8
# What all contenders get. float32 has this beta2 exactly. In float32, 1 - 0.999 is wrong by 5e-5:
# steps that are right would look wrong, or not, by where a kernel rounds.
HYPER_PARAMETERS = {
    "learning_rate": LEARNING_RATE,
    "eps": EPS,
    "beta1": 0.9,
    "beta2": 1 - 2**-10,
    "weight_decay": 0.0,
}


def first_states(optimizer: str, gradient: Tensor) -> list[Tensor]:
    """What a step makes of state that is zero, moment by moment; none of SGD.

    Args:
        optimizer: key of `CONTENDER_SUFFIXES`.
        gradient: in float64; a slice of its first dimension is what row-wise Adagrad calls a row.
    """
    if optimizer == "exact_sgd":
        return []
    squares = gradient.square()
    if optimizer == "exact_row_wise_adagrad":
        return [squares.flatten(1).mean(1)]
    if optimizer == "adam":
        beta1, beta2 = (HYPER_PARAMETERS[name] for name in ("beta1", "beta2"))
        return [(1 - beta1) * gradient, (1 - beta2) * squares]
    return [squares]


def state_sizes(optimizer: str, states: Sequence[Tensor]) -> list[Tensor]:
    """States as sizes of the gradient: squares by their roots.

    The relative error of these is at most that of the gradient. That of squares is twice as large,
    and more where few elements are much larger than the others, as theirs is all that it shows.
    """
    if optimizer == "adam":
        first, second = states
        return [first, second.sqrt()]
    return [state.sqrt() for state in states]


def first_direction(optimizer: str, gradient: Tensor, eps: float) -> Tensor:
    """What that step subtracts from the parameters, at a learning rate of 1.

    Adam's bias correction makes its first moments the gradient and its square, so that its
    direction is Adagrad's.
    """
    if optimizer == "exact_sgd":
        return gradient
    if optimizer == "exact_row_wise_adagrad":
        (size,) = state_sizes(optimizer, first_states(optimizer, gradient))
        size = size.view(-1, *[1] * (gradient.dim() - 1))
    else:
        size = gradient.abs()
    return gradient / (size + eps)
