"""What a call must return, in float64 from dense (or row by row) reconstruction of the tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.gpu.calls import MEAN, Call

_LARGEST_DENSE_TABLE = 1 << 24  # elements; larger tables are reconstructed row by row


def dense_table(cores: Sequence[Tensor]) -> Tensor:
    """All rows of a table, [prod(p), D]."""
    table = cores[0].new_ones(1, 1, 1)
    for core in cores:
        table = torch.einsum("ijr,prqs->ipjqs", table, core)
        table = table.flatten(2, 3).flatten(0, 1)
    return table.squeeze(-1)


def rows(cores: Sequence[Tensor], indices: Tensor) -> Tensor:
    """The rows looked up, [n, D]."""
    p = [core.shape[0] for core in cores]
    dim = math.prod(core.shape[2] for core in cores)
    if math.prod(p) * dim <= _LARGEST_DENSE_TABLE:
        return dense_table(cores)[indices]
    prefix = cores[0].new_ones(indices.numel(), 1, 1)
    for k, core in enumerate(cores):
        digits = indices // math.prod(p[k + 1 :]) % p[k]
        prefix = torch.einsum("njr,nrqs->njqs", prefix, core[digits]).flatten(1, 2)
    return prefix.squeeze(-1)


@dataclasses.dataclass
class Expected:
    """Float64 results on the CPU, differentiable in `cores` and `per_sample_weights`."""

    output: Tensor
    cores: list[Tensor]
    per_sample_weights: Tensor

    def gradients(self, grad_output: Tensor) -> tuple[list[Tensor], Tensor]:
        """Gradients of the cores and of the weights (zeros where nothing was looked up)."""
        inputs = [*self.cores, self.per_sample_weights]
        found = torch.autograd.grad(
            self.output, inputs, grad_output.detach().cpu().double(), allow_unused=True
        )
        *cores, weights = [
            torch.zeros_like(given) if grad is None else grad
            for grad, given in zip(found, inputs, strict=True)
        ]
        return cores, weights


def expect(call: Call) -> Expected:
    """Pools the reconstructed rows bag by bag."""
    cores = [core.detach().cpu().double().requires_grad_() for core in call.cores]
    indices = call.indices.cpu().long()
    offsets = call.offsets.cpu().long()
    if call.per_sample_weights is None:
        weights = torch.ones(indices.numel(), dtype=torch.float64)
    else:
        weights = call.per_sample_weights.detach().cpu().double()
    weights.requires_grad_()

    tables = call.cores_of_tables(cores)
    columns = []
    for feature, table in enumerate(call.feature_table_map):
        bags = offsets[feature * call.batch_size : (feature + 1) * call.batch_size + 1]
        lengths = bags.diff()
        begin, end = int(bags[0]), int(bags[-1])
        weighted = rows(tables[table], indices[begin:end]) * weights[begin:end, None]
        sample = torch.repeat_interleave(torch.arange(call.batch_size), lengths)
        pooled = weighted.new_zeros(call.batch_size, weighted.shape[1])
        pooled = pooled.index_add(0, sample, weighted)
        if call.pooling_mode == MEAN:
            pooled = pooled / lengths.clamp(min=1)[:, None]
        columns.append(pooled)
    return Expected(torch.cat(columns, 1), cores, weights)


def touched_slices(call: Call) -> list[Tensor]:
    """Per core, whether each slice was looked up: bool [p_k]."""
    indices, offsets = call.indices.cpu().long(), call.offsets.cpu().long()
    touched = call.cores_of_tables(
        [torch.zeros(core.shape[0], dtype=torch.bool) for core in call.cores]
    )
    for feature, table in enumerate(call.feature_table_map):
        begin = int(offsets[feature * call.batch_size])
        end = int(offsets[(feature + 1) * call.batch_size])
        remaining = indices[begin:end]
        for flags in reversed(touched[table]):
            flags[remaining % flags.numel()] = True
            remaining = remaining // flags.numel()
    return [flags for table in touched for flags in table]


def step(
    optimizer: str,
    value: Tensor,
    grad: Tensor,
    touched: Tensor,
    momentum1: Tensor | None,
    momentum2: Tensor | None,
    *,
    learning_rate: float,
    iteration: int,
    eps: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """One core and its states after one step, float64; untouched slices stay as they are."""
    mask = touched.reshape(-1, 1, 1, 1)
    if optimizer == "exact_sgd":
        return value - learning_rate * grad, None, None
    assert momentum1 is not None
    if optimizer == "exact_adagrad":
        squares = momentum1 + grad**2
        new = value - learning_rate * grad / (squares.sqrt() + eps)
        return torch.where(mask, new, value), squares, None
    if optimizer == "exact_row_wise_adagrad":
        squares = momentum1 + (grad**2).flatten(1).mean(1)
        rate = learning_rate / (squares.sqrt() + eps)
        return torch.where(mask, value - rate.reshape(-1, 1, 1, 1) * grad, value), squares, None
    assert optimizer == "adam" and momentum2 is not None
    first = torch.where(mask, beta1 * momentum1 + (1 - beta1) * grad, momentum1)
    second = torch.where(mask, beta2 * momentum2 + (1 - beta2) * grad**2, momentum2)
    direction = (first / (1 - beta1**iteration)) / (
        (second / (1 - beta2**iteration)).sqrt() + eps
    ) + weight_decay * value
    return torch.where(mask, value - learning_rate * direction, value), first, second
