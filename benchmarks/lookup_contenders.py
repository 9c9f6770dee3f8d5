"""What the lookup benchmarks compare: TT tables, and FBGEMM's uncompressed tables.

A contender is built for one workload. It looks up, trains with its mode's optimizer, and knows in
float64 what should come out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Protocol

import torch
from lookup_modes import Mode
from lookup_optimizers import HYPER_PARAMETERS
from lookup_workloads import Batch, Workload
from torch import Tensor

from torchrec_flowtt.functional import rows
from torchrec_flowtt.modules import OptimType, TableBatchedFlowTTEmbeddingBags

_REFERENCE_ELEMENTS = 2**26  # of core slices that a float64 chain gathers at a time
_CHECKED_ROWS = 2048  # a table, of the gradient of an uncompressed one


class Contender(Protocol):
    """One implementation with the tables of one workload."""

    def __call__(self, batch: Batch) -> Tensor:
        """The lookup, ``[B, T * D]``."""

    def rows(self, table: int, indices: Tensor) -> Tensor:
        """Rows of a table in float64, ``[n, D]``."""

    def set_step(self, learning_rate: float, eps: float) -> None:
        """Of the optimizer's step that a backward takes."""

    def gradients(self, batch: Batch, grad: Tensor) -> list[Tensor]:
        """In float64, of (parts of) the parameters, from that of the output, ``[B, T * D]``."""

    def parameters(self, batch: Batch) -> list[Tensor]:
        """Copies in float64 of what :meth:`gradients` belong to."""

    def states(self, batch: Batch) -> list[list[Tensor]]:
        """Copies in float64 of the optimizer's state for each of these, moment by moment."""


class FlowTT:
    """`TableBatchedFlowTTEmbeddingBags`."""

    def __init__(self, workload: Workload, mode: Mode, device: torch.device) -> None:
        """Draws cores."""
        self._workload = workload
        self.module = TableBatchedFlowTTEmbeddingBags(
            [workload.spec] * workload.tables,
            pooling_mode=workload.pooling,
            optimizer=mode.optimizer,
            **HYPER_PARAMETERS,
            weights_precision=mode.weights_dtype,
            output_dtype=workload.output_torch_dtype,
            device=device,
        )
        self.module.keep_packed_cores(mode.keeps_packed_cores)
        largest_slice = max(math.prod(shape[1:]) for shape in workload.spec.core_shapes)
        self._chunk = max(1, _REFERENCE_ELEMENTS // largest_slice)

    def __call__(self, batch: Batch) -> Tensor:
        """The lookup."""
        return self.module(batch.indices, batch.offsets, batch.per_sample_weights)

    def rows(self, table: int, indices: Tensor) -> Tensor:
        """By the chain in float64."""
        cores = [core.detach().double() for core in self.module.split_tt_cores()[table]]
        return torch.cat([rows(cores, part) for part in indices.split(self._chunk)])

    def set_step(self, learning_rate: float, eps: float) -> None:
        """Of the fused optimizer."""
        self.module.set_learning_rate(learning_rate)
        config = dataclasses.replace(self.module.optimizer_config, eps=eps)
        self.module.optimizer_config = config

    def gradients(self, batch: Batch, grad: Tensor) -> list[Tensor]:
        """By autograd through the chain in float64; of all cores."""
        found = []
        for table, cores in enumerate(self.module.split_tt_cores()):
            leaves = [core.detach().double().requires_grad_() for core in cores]
            indices, row_grads = lookup_gradients(self._workload, batch, grad, table)
            for part, (bags, factors) in zip(
                indices.split(self._chunk), row_grads.chunks(self._chunk), strict=True
            ):
                rows(leaves, part).backward(bags * factors)
            found += [leaf.grad for leaf in leaves]
        return found

    def parameters(self, batch: Batch) -> list[Tensor]:
        """The cores."""
        return [core.detach().double() for core in self.module.tt_cores]

    def states(self, batch: Batch) -> list[list[Tensor]]:
        """Of the cores."""
        return [
            [state.double() for state in states.values()]
            for table in self.module.split_optimizer_states()
            for states in table
        ]


class Fbgemm:
    """FBGEMM's table-batched embedding on uncompressed tables.

    Args:
        bounds_check: member of FBGEMM's `BoundsCheckMode`; None leaves FBGEMM's default.
    """

    def __init__(
        self,
        workload: Workload,
        mode: Mode,
        device: torch.device,
        bounds_check: str | None = None,
    ) -> None:
        """Draws tables."""
        from fbgemm_gpu import split_table_batched_embeddings_ops_common as common
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType

        self._workload = workload
        if device.type == "cuda":
            place = (common.EmbeddingLocation.DEVICE, training.ComputeDevice.CUDA)
        else:
            place = (common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)
        checks = {}
        if bounds_check is not None:
            checks["bounds_check_mode"] = common.BoundsCheckMode[bounds_check]
        table = (workload.num_embeddings, workload.embedding_dim, *place)
        self.module = training.SplitTableBatchedEmbeddingBagsCodegen(
            [table] * workload.tables,
            optimizer=EmbOptimType(mode.optimizer),
            **HYPER_PARAMETERS,
            weights_precision=SparseType.from_dtype(mode.weights_dtype),
            output_dtype=SparseType.from_dtype(workload.output_torch_dtype),
            pooling_mode=common.PoolingMode[workload.pooling.upper()],
            device=device,
            **checks,
        )
        bound = workload.num_embeddings**-0.5
        self.module.init_embedding_weights_uniform(-bound, bound)

    def __call__(self, batch: Batch) -> Tensor:
        """The lookup."""
        return self.module(batch.indices, batch.offsets, batch.per_sample_weights)

    def rows(self, table: int, indices: Tensor) -> Tensor:
        """As stored."""
        return self.module.split_embedding_weights()[table].detach()[indices.long()].double()

    def set_step(self, learning_rate: float, eps: float) -> None:
        """Of the fused optimizer."""
        self.module.update_hyper_parameters({"lr": learning_rate, "eps": eps})

    def _checked_rows(self, batch: Batch, table: int) -> Tensor:
        indices = batch.of_tables(self._workload)[0][table].flatten()
        return indices[:: -(-indices.numel() // _CHECKED_ROWS)].unique()

    def gradients(self, batch: Batch, grad: Tensor) -> list[Tensor]:
        """Of some of the rows."""
        found = []
        for table in range(self._workload.tables):
            checked = self._checked_rows(batch, table)
            indices, row_grads = lookup_gradients(self._workload, batch, grad, table)
            place = torch.searchsorted(checked, indices).clamp_(max=checked.numel() - 1)
            hits = (checked[place] == indices).nonzero().flatten()
            bags, factors = row_grads.of(hits)
            total = bags.new_zeros((checked.numel(), self._workload.embedding_dim))
            found.append(total.index_add_(0, place[hits], bags * factors))
        return found

    def parameters(self, batch: Batch) -> list[Tensor]:
        """The same rows."""
        return [
            self.rows(table, self._checked_rows(batch, table))
            for table in range(self._workload.tables)
        ]

    def states(self, batch: Batch) -> list[list[Tensor]]:
        """Of the same rows."""
        # SGD has no list of each table's.
        tables = self.module.split_optimizer_states() or [()] * self._workload.tables
        return [
            [state[self._checked_rows(batch, table)].double() for state in states]
            for table, states in enumerate(tables)
        ]


@dataclasses.dataclass(frozen=True)
class LookupGradients:
    """Gradients of the rows of single lookups, in float64, as bag gradients times factors."""

    bag_grads: Tensor  # [B, D]
    factors: Tensor  # [B * L, 1]
    pooling_factor: int

    def of(self, lookups: Tensor) -> tuple[Tensor, Tensor]:
        """Bag gradients ``[n, D]`` and factors ``[n, 1]`` of some lookups."""
        return self.bag_grads[lookups // self.pooling_factor], self.factors[lookups]

    def chunks(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All of them, `size` at a time."""
        lookups = torch.arange(self.factors.shape[0], device=self.factors.device)
        for part in lookups.split(size):
            yield self.of(part)


def lookup_gradients(
    workload: Workload, batch: Batch, grad: Tensor, table: int
) -> tuple[Tensor, LookupGradients]:
    """Row indices ``[B * L]`` of a table's lookups, and their gradients."""
    indices, weights = batch.of_tables(workload)
    columns = slice(table * workload.embedding_dim, (table + 1) * workload.embedding_dim)
    flat = indices[table].flatten()
    factors = (
        flat.new_ones(flat.shape, dtype=torch.float64)
        if weights is None
        else weights[table].flatten().double()
    )
    if workload.pooling == "mean":
        factors = factors / workload.pooling_factor
    bag_grads = grad[:, columns].double()
    return flat, LookupGradients(bag_grads, factors.unsqueeze(1), workload.pooling_factor)


def build(workload: Workload, mode: Mode, device: torch.device) -> Contender:
    """The contender of a mode, with the workload's tables."""
    if mode.is_tensor_train:
        return FlowTT(workload, mode, device)
    return Fbgemm(workload, mode, device, "NONE" if mode.contender == "fbgemm_no_check" else None)


def parameter_bytes(workload: Workload, mode: Mode) -> int:
    """Of all tables."""
    if mode.is_tensor_train:
        return workload.tables * workload.spec.num_bytes(mode.weights_dtype)
    elements = workload.tables * workload.num_embeddings * workload.embedding_dim
    return elements * mode.weights_dtype.itemsize


def state_bytes(workload: Workload, mode: Mode) -> int:
    """Of the optimizer's state of all tables, which is float32 throughout."""
    optimizer = OptimType(mode.optimizer)
    if optimizer is OptimType.EXACT_ROWWISE_ADAGRAD:
        spec = workload.spec
        rows = sum(spec.p_shapes) if mode.is_tensor_train else spec.num_embeddings
        return 4 * workload.tables * rows
    elements = parameter_bytes(workload, mode) // mode.weights_dtype.itemsize
    return 4 * elements * optimizer.num_moments
