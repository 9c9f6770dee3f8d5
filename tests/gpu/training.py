"""A call with an optimizer, and what one fused step must make of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from tests.gpu.calls import Call, accumulation_dtype
from tests.gpu.expected import expect, step, touched_slices
from tests.gpu.tolerance import assert_matches

OPTIMIZERS = ["exact_sgd", "exact_adagrad", "exact_row_wise_adagrad", "adam"]


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

    def __post_init__(self) -> None:
        device = self.call.cores[0].device
        dtype = accumulation_dtype(self.call.cores[0].dtype)
        rows = [torch.zeros(core.shape[0], device=device, dtype=dtype) for core in self.call.cores]
        like = [torch.zeros_like(core, dtype=dtype) for core in self.call.cores]
        self.momentum1 = {
            "exact_sgd": [],
            "exact_adagrad": like,
            "exact_row_wise_adagrad": rows,
            "adam": like,
        }[self.optimizer]
        self.momentum2 = [torch.zeros_like(m) for m in like] if self.optimizer == "adam" else []
        self.learning_rate = torch.tensor(0.1, device=device)
        self.iter = torch.zeros((), dtype=torch.int64, device=device)

    def arguments(self, grad: Tensor) -> tuple[Any, ...]:
        cores, *bags = self.call.arguments
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
        torch.ops.flowtt.tt_embedding_bag_backward_update(*self.arguments(grad))

    def states(self) -> list[list[Tensor]]:
        return [self.call.cores, self.momentum1, self.momentum2]

    def expected(self, grad: Tensor) -> list[list[Tensor]]:
        """Cores and states after one step from where they are now."""
        core_grads, _ = expect(self.call).gradients(grad)
        stepped = [
            step(
                self.optimizer,
                core.cpu().double(),
                core_grad,
                touched,
                self.momentum1[i].cpu().double() if self.momentum1 else None,
                self.momentum2[i].cpu().double() if self.momentum2 else None,
                learning_rate=self.learning_rate.item(),
                iteration=int(self.iter.item()),
                eps=self.eps,
                beta1=self.beta1,
                beta2=self.beta2,
                weight_decay=self.weight_decay,
            )
            for i, (core, core_grad, touched) in enumerate(
                zip(self.call.cores, core_grads, touched_slices(self.call), strict=True)
            )
        ]
        cores, momentum1, momentum2 = zip(*stepped, strict=True)
        return [
            list(cores),
            [m for m in momentum1 if m is not None],
            [m for m in momentum2 if m is not None],
        ]


def assert_step_matches(training: Training, grad: Tensor, tolerance: float | None = None) -> None:
    """Makes one step and compares cores and states."""
    expected = training.expected(grad)
    before = [state.clone() for states in training.states() for state in states]
    training.update(grad)
    for states, expected_states in zip(training.states(), expected, strict=True):
        assert len(states) == len(expected_states)
        for actual, wanted in zip(states, expected_states, strict=True):
            assert_matches(actual, wanted, tolerance)
    # Untouched slices keep their exact values and states.
    after = [state for states in training.states() for state in states]
    touched = touched_slices(training.call)
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        flags = ~touched[i % len(touched)].to(new.device)
        assert torch.equal(old[flags], new[flags])
