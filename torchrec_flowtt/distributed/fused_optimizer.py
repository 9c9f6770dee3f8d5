"""The optimizer of table-wise TT tables as TorchRec sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer

from torchrec_flowtt.distributed.core_states import CorePlacement
from torchrec_flowtt.modules import TableBatchedFlowTTEmbeddingBags


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


def mark_in_backward(parameter: nn.Parameter) -> None:
    """Mark `parameter` as trained inside the backward pass, so that dense optimizers skip it.

    TorchRec's ``in_backward_optimizer_filter`` looks for the mark. Learning rates are changed
    through the collection's ``fused_optimizer``.
    """
    parameter._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]
