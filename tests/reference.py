"""The reference of all lookups: the table reconstructed densely in float64.

Nothing here uses the package: the definition of a TT table is written out once more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

SUM, MEAN, NONE = 0, 1, 2
_LARGEST_DENSE_TABLE = 1 << 22  # entries; larger tables are reconstructed row by row


def dense_table(cores: Sequence[Tensor]) -> Tensor:
    """All rows of a table, ``[prod(p), D]`` in float64, differentiable."""
    table = torch.ones(1, 1, 1, dtype=torch.float64)  # [rows, columns, rank]
    for core in cores:
        table = torch.einsum("nmr,prqs->npmqs", table, core.double())
        table = table.reshape(
            table.shape[0] * table.shape[1], table.shape[2] * table.shape[3], table.shape[4]
        )
    return table[:, :, 0]


def table_rows(cores: Sequence[Tensor], ids: Tensor) -> Tensor:
    """The rows ``ids``, ``[n, D]`` in float64, differentiable."""
    p = [core.shape[0] for core in cores]
    if math.prod(p) * math.prod(core.shape[2] for core in cores) <= _LARGEST_DENSE_TABLE:
        return dense_table(cores).index_select(0, ids.long())
    product = torch.ones(ids.numel(), 1, 1, dtype=torch.float64)
    for k, core in enumerate(cores):
        digit = ids.long() // math.prod(p[k + 1 :]) % p[k]
        product = torch.einsum("nmr,nrqs->nmqs", product, core.double()[digit]).flatten(1, 2)
    return product[:, :, 0]


@dataclasses.dataclass
class Bags:
    """Everything of a call but the cores; the operators' argument names."""

    indices: Tensor
    offsets: Tensor
    per_sample_weights: Tensor | None
    cores_per_table: list[int]
    num_embeddings: list[int]
    feature_table_map: list[int]
    pooling_mode: int

    @property
    def batch_size(self) -> int:
        """B."""
        return (self.offsets.numel() - 1) // len(self.feature_table_map)

    def arguments(self) -> tuple[object, ...]:
        """In the order of the operators' schemas."""
        return (
            self.indices,
            self.offsets,
            self.per_sample_weights,
            self.cores_per_table,
            self.num_embeddings,
            self.feature_table_map,
            self.pooling_mode,
        )


def split_tables(cores: Sequence[Tensor], cores_per_table: Sequence[int]) -> list[list[Tensor]]:
    """The flat list of cores, table by table."""
    tables = []
    first = 0
    for count in cores_per_table:
        tables.append(list(cores[first : first + count]))
        first += count
    return tables


def embedding_bag(cores: Sequence[Tensor], bags: Bags, weights: Tensor | None = None) -> Tensor:
    """``[B, sum_f D_f]``, or ``[nnz, D]`` without pooling, in float64, differentiable.

    Args:
        cores: any dtype.
        bags: the call.
        weights: replaces ``bags.per_sample_weights``, to differentiate in it.
    """
    tables = split_tables(cores, bags.cores_per_table)
    weights = bags.per_sample_weights if weights is None else weights
    outputs = []
    for feature, table in enumerate(bags.feature_table_map):
        begin = feature * bags.batch_size
        offsets = bags.offsets[begin : begin + bags.batch_size + 1].long()
        lookups = slice(int(offsets[0]), int(offsets[-1]))
        rows = table_rows(tables[table], bags.indices[lookups])
        if weights is not None:
            rows = rows * weights[lookups].double()[:, None]
        if bags.pooling_mode == NONE:
            outputs.append(rows)
            continue
        lengths = offsets.diff()
        bag = torch.arange(bags.batch_size).repeat_interleave(lengths)
        output = torch.zeros(bags.batch_size, rows.shape[1], dtype=torch.float64)
        output = output.index_add(0, bag, rows)
        if bags.pooling_mode == MEAN:
            output = output / lengths.clamp(min=1)[:, None]
        outputs.append(output)
    return torch.cat(outputs, dim=0 if bags.pooling_mode == NONE else 1)


@dataclasses.dataclass
class Gradients:
    """Float64 gradients of ``(embedding_bag * grad_output).sum()``."""

    cores: list[Tensor]
    weights: Tensor | None


def gradients(cores: Sequence[Tensor], bags: Bags, grad_output: Tensor) -> Gradients:
    """Gradients by autograd through the dense reconstruction."""
    leaves = [core.detach().double().requires_grad_() for core in cores]
    weights = bags.per_sample_weights
    leaf_weights = None if weights is None else weights.detach().double().requires_grad_()
    output = embedding_bag(leaves, bags, leaf_weights)
    inputs = leaves if leaf_weights is None else [*leaves, leaf_weights]
    grads = torch.autograd.grad(
        output, inputs, grad_output.double(), allow_unused=True, materialize_grads=True
    )
    return Gradients(list(grads[: len(leaves)]), grads[-1] if leaf_weights is not None else None)


def magnitudes(cores: Sequence[Tensor], bags: Bags) -> tuple[list[Tensor], Bags]:
    """A call whose results are the sums of the magnitudes of the terms of this one's results."""
    weights = bags.per_sample_weights
    bags = dataclasses.replace(bags, per_sample_weights=None if weights is None else weights.abs())
    return [core.abs() for core in cores], bags


def touched_slices(cores: Sequence[Tensor], bags: Bags) -> list[Tensor]:
    """For each core, which slices the call looks up, ``[p_k]`` bool."""
    touched = [torch.zeros(core.shape[0], dtype=torch.bool) for core in cores]
    for feature, table in enumerate(bags.feature_table_map):
        begin = feature * bags.batch_size
        lookups = slice(int(bags.offsets[begin]), int(bags.offsets[begin + bags.batch_size]))
        ids = bags.indices[lookups].long()
        first = sum(bags.cores_per_table[:table])
        for k in reversed(range(bags.cores_per_table[table])):
            p = cores[first + k].shape[0]
            touched[first + k][ids % p] = True
            ids = ids // p
    return touched


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Hyper-parameters by the operators' names; defaults are those of FBGEMM's TBE."""

    name: str
    learning_rate: float = 0.01
    eps: float = 1.0e-8
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0


def optimizer_states(optimizer: Optimizer, cores: Sequence[Tensor]) -> tuple[list[Tensor], ...]:
    """Zero ``momentum1`` and ``momentum2`` lists, in the accumulation dtype."""

    def like_cores() -> list[Tensor]:
        return [
            torch.zeros_like(c, dtype=torch.float64 if c.dtype == torch.float64 else torch.float32)
            for c in cores
        ]

    if optimizer.name == "exact_sgd":
        return [], []
    if optimizer.name == "exact_adagrad":
        return like_cores(), []
    if optimizer.name == "exact_row_wise_adagrad":
        return [state.flatten(1)[:, 0].contiguous() for state in like_cores()], []
    return like_cores(), like_cores()


def step(
    optimizer: Optimizer,
    cores: list[Tensor],
    momentum1: list[Tensor],
    momentum2: list[Tensor],
    bags: Bags,
    grad_output: Tensor,
    iteration: int,
) -> None:
    """One step in place, in float64: all tensors are float64 here.

    The formulas are FBGEMM's (its documentation of ``EmbOptimType``), one row being one core slice:
    only slices that are looked up move, each once, by its gradient summed over the batch.
    """
    grads = gradients(cores, bags, grad_output).cores
    touched = touched_slices(cores, bags)
    rate = float(torch.tensor(optimizer.learning_rate, dtype=torch.float32))  # as it is passed
    eps = optimizer.eps
    for k, core in enumerate(cores):
        at = touched[k]
        grad = grads[k][at]
        if optimizer.name == "exact_sgd":
            core[at] -= rate * grad
        elif optimizer.name == "exact_adagrad":
            momentum1[k][at] += grad**2
            core[at] -= rate * grad / (momentum1[k][at].sqrt() + eps)
        elif optimizer.name == "exact_row_wise_adagrad":
            momentum1[k][at] += (grad**2).flatten(1).mean(1)
            scale = rate / (momentum1[k][at].sqrt() + eps)
            core[at] -= scale[:, None, None, None] * grad
        else:
            beta1, beta2 = optimizer.beta1, optimizer.beta2
            momentum1[k][at] = beta1 * momentum1[k][at] + (1 - beta1) * grad
            momentum2[k][at] = beta2 * momentum2[k][at] + (1 - beta2) * grad**2
            first = momentum1[k][at] / (1 - beta1**iteration)
            second = momentum2[k][at] / (1 - beta2**iteration)
            core[at] -= rate * (first / (second.sqrt() + eps) + optimizer.weight_decay * core[at])
