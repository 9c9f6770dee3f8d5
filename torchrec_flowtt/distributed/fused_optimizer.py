"""The optimizer of table-wise TT tables as TorchRec sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer

from torchrec_flowtt.distributed.core_states import CorePlacement
from torchrec_flowtt.modules import (
    OptimizerConfig,
    OptimType,
    TableBatchedFlowTTEmbeddingBags,
)
from torchrec_flowtt.shapes import TTSpec


class FlowTTFusedOptimizer(FusedOptimizer):
    """State and learning rate of optimizers that step inside the backward pass.

    Parameters are keyed ``<table>.tt_cores.<k>``; the state of each is a dictionary of
    ``<table>.momentum1``, ``<table>.momentum2`` as the optimizer has them and ``<table>.iter``,
    the number of steps done, ``[1]`` int64. ``step`` and ``zero_grad`` only pass
    ``param_groups[0]["lr"]`` on, so learning-rate schedulers and warm-up wrappers work as with
    FBGEMM tables.

    Args:
        module: the module whose backward pass steps.
        tables: names of its tables, in its order.
        placements: for each table, where its cores are.
    """

    def __init__(
        self,
        module: TableBatchedFlowTTEmbeddingBags,
        tables: Sequence[str],
        placements: Mapping[str, CorePlacement],
    ) -> None:
        """Builds it; see the class for the arguments."""
        self._module = module
        params: dict[str, Any] = {}
        state: dict[Any, dict[str, Any]] = {}
        cores_by_table = module.split_tt_cores()
        states_by_table = module.split_optimizer_states()
        for table, cores, states in zip(tables, cores_by_table, states_by_table, strict=True):
            placement = placements[table]
            for k, (core, core_states) in enumerate(zip(cores, states, strict=True)):
                weight = placement.distribute(core.shape, core.dtype, core.detach())
                params[f"{table}.tt_cores.{k}"] = weight
                # One view of the step counter a core: loading any of them loads the counter.
                named = {**core_states, "iter": module.iter.view(1)}
                state[weight] = {
                    f"{table}.{name}": placement.distribute(value.shape, value.dtype, value)
                    for name, value in named.items()
                }
        group = {"params": list(params.values()), "lr": float(module.learning_rate)}
        super().__init__(params, state, [group])

    def step(self, closure: Any = None) -> None:
        """Pass the learning rate on; the update itself happened in backward."""
        self._module.set_learning_rate(self.param_groups[0]["lr"])

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Pass the learning rate on; there are no gradients to clear."""
        self._module.set_learning_rate(self.param_groups[0]["lr"])

    @torch.no_grad()
    def set_optimizer_step(self, step: int) -> None:
        """Set the number of steps done."""
        self._module.iter.fill_(step)


@dataclass(frozen=True)
class RemoteTable:
    """A table-wise TT table whose cores are on another rank.

    Attributes:
        spec: its TT shape.
        dtype: dtype of its cores.
        config: its optimizer.
        placement: where its cores are.
    """

    spec: TTSpec
    dtype: torch.dtype
    config: OptimizerConfig
    placement: CorePlacement


class RemoteTablesOptimizer(FusedOptimizer):
    """Entries of TT tables of other ranks: the same keys and sizes, no local shard.

    With them every rank's optimizer state dict has the same keys. torch.distributed.checkpoint
    otherwise fails to load on a rank that has no table of its own ("Missing key in checkpoint").

    Args:
        tables: tables on other ranks by name.
        prefix: of parameter keys.
    """

    def __init__(self, tables: Mapping[str, RemoteTable], prefix: str) -> None:
        """Builds it; see the class for the arguments."""
        params: dict[str, Any] = {}
        state: dict[Any, dict[str, Any]] = {}
        for name, table in tables.items():
            for k, shape in enumerate(table.spec.core_shapes):
                weight = table.placement.distribute(shape, table.dtype, None)
                params[f"{prefix}{name}.tt_cores.{k}"] = weight
                by_slice = table.config.optimizer is OptimType.EXACT_ROWWISE_ADAGRAD
                moment = shape[:1] if by_slice else shape
                state[weight] = {
                    f"{name}.momentum{m}": table.placement.distribute(moment, torch.float32, None)
                    for m in range(1, table.config.optimizer.num_moments + 1)
                }
                state[weight][f"{name}.iter"] = table.placement.distribute((1,), torch.int64, None)
        super().__init__(params, state, [])

    def step(self, closure: Any = None) -> None:
        """Do nothing; the table's own rank steps."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do nothing; the table's own rank has the gradients."""


class StatefulCombinedOptimizer(CombinedOptimizer):
    """The optimizers of a collection, without the entries of tables that have no state.

    FBGEMM tables under SGD have an empty state. An empty dictionary in a state dict is dropped
    when torch.distributed.checkpoint saves it and looked for when it loads ("Missing key in
    checkpoint"), so it is left out of both.
    """

    @property
    def state(self) -> dict[Any, Any]:
        """State by parameter, of parameters that have any."""
        return {param: state for param, state in super().state.items() if state}


def mark_in_backward(parameter: nn.Parameter) -> None:
    """Mark `parameter` as trained inside the backward pass, so that dense optimizers skip it.

    TorchRec's ``in_backward_optimizer_filter`` looks for the mark. Learning rates are changed
    through the collection's ``fused_optimizer``.
    """
    parameter._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]
