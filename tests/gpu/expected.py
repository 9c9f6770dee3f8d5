"""What a call on the GPU must return: tests/reference.py on copies of its tensors."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from tests import reference
from tests.gpu.calls import Call
from tests.tolerances import assert_close

# A general kernel adds up its float32 products one after the other, the longest sums have some
# thousand terms.
_FLOAT32_SLACK = 5.0


@dataclasses.dataclass
class Expected:
    """The reference of one call, from its tensors as they were when it was made."""

    cores: list[Tensor]
    bags: reference.Bags

    @property
    def output(self) -> Tensor:
        return reference.embedding_bag(self.cores, self.bags)

    def gradients(self, grad_output: Tensor) -> tuple[list[Tensor], Tensor]:
        """Gradients of the cores and of the weights (of weights of 1 where the call has none)."""
        found = reference.gradients(self.cores, self.bags, grad_output.cpu())
        assert found.weights is not None
        return found.cores, found.weights

    def touched_slices(self) -> list[Tensor]:
        return reference.touched_slices(self.cores, self.bags)


def expect(call: Call) -> Expected:
    copy = call.to("cpu")
    if copy.per_sample_weights is None:
        copy.per_sample_weights = torch.ones(copy.indices.numel(), dtype=torch.float64)
    return Expected([core.double() for core in copy.cores], copy)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """In the Frobenius norm; `expected` is float64 on the CPU."""
    difference = actual.cpu().double() - expected
    return (difference.norm() / expected.norm()).item()


def assert_matches(actual: Tensor, expected: Tensor, slack: float = 1.0) -> None:
    """Compares on the CPU, with the tolerance of the dtype of `actual`."""
    assert actual.isfinite().all()
    if actual.dtype == torch.float32:
        slack *= _FLOAT32_SLACK
    assert_close(actual.detach().cpu(), expected.detach().cpu().double(), "CUDA", slack)


def are_equal(results: list[list[Tensor]]) -> bool:
    """Whether every result has the bits of the first."""
    return all(
        torch.equal(tensor, first)
        for result in results[1:]
        for tensor, first in zip(result, results[0], strict=True)
    )
