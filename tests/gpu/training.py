"""A call with an optimizer, and what one fused step must make of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tests import reference
from tests.gpu.calls import Call
from tests.gpu.expected import assert_matches, expect
from torchrec_flowtt.functional.cores import accumulation_dtype

OPTIMIZERS = ["exact_sgd", "exact_adagrad", "exact_row_wise_adagrad", "adam"]

# Factors on the tolerances of one lookup: the division by a root amplifies the gradient's error.
STEP_SLACK = {
    torch.float64: 100.0,
    torch.float32: 10.0,
    torch.float16: 2.0,
    torch.bfloat16: 2.0,
}


@dataclasses.dataclass
class Training:
    """A call with the state of an optimizer."""

    call: Call
    optimizer: str
    # Large, so that Adagrad's division does not blow up the error of a gradient near zero.
    eps: float = 1e-2
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.05
    deterministic: bool = False

    def __post_init__(self) -> None:
        device = self.call.cores[0].device
        self.learning_rate = torch.tensor(0.1, device=device)
        self.iter = torch.zeros((), dtype=torch.int64, device=device)
        self.momentum1, self.momentum2 = reference.optimizer_states(
            self.hyper_parameters(), self.call.cores
        )

    def hyper_parameters(self) -> reference.Optimizer:
        return reference.Optimizer(
            self.optimizer,
            self.learning_rate.item(),
            self.eps,
            self.beta1,
            self.beta2,
            self.weight_decay,
        )

    def arguments(self, grad: Tensor) -> tuple[Any, ...]:
        cores, *bags = self.call.operands()
        return (
            grad,
            cores,
            self.momentum1,
            self.momentum2,
            *bags,
            self.learning_rate,
            self.iter,
            self.optimizer,
            self.eps,
            self.beta1,
            self.beta2,
            self.weight_decay,
        )

    def update(self, grad: Tensor) -> None:
        """As the modules do: with the order of the lookups that the forward pass has kept."""
        output_dtype = accumulation_dtype(self.call.cores[0].dtype)
        _, order = torch.ops.flowtt.tt_embedding_bag_with_order(
            *self.call.operands(), output_dtype, False, self.deterministic
        )
        torch.ops.flowtt.tt_embedding_bag_backward_update(
            *self.arguments(grad), False, order, deterministic=self.deterministic
        )

    def states(self) -> list[list[Tensor]]:
        return [self.call.cores, self.momentum1, self.momentum2]

    def expected(self, grad: Tensor) -> list[list[Tensor]]:
        """Cores and states after one step from where they are now."""
        stepped = [
            [state.to("cpu", torch.float64, copy=True) for state in states]
            for states in self.states()
        ]
        reference.step(
            self.hyper_parameters(),
            *stepped,
            expect(self.call).bags,
            grad.cpu(),
            int(self.iter.item()) + 1,
        )
        return stepped


def assert_step_matches(training: Training, grad: Tensor) -> None:
    """Makes one step and compares cores and states."""
    expected = training.expected(grad)
    before = [state.clone() for states in training.states() for state in states]
    steps = training.iter.item()
    training.update(grad)
    assert training.iter.item() == steps + 1
    for states, expected_states in zip(training.states(), expected, strict=True):
        for actual, wanted in zip(states, expected_states, strict=True):
            assert_matches(actual, wanted, STEP_SLACK[actual.dtype])
    # Untouched slices keep their exact values and states.
    after = [state for states in training.states() for state in states]
    touched = expect(training.call).touched_slices()
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        flags = ~touched[i % len(touched)].to(new.device)
        assert torch.equal(old[flags], new[flags])
