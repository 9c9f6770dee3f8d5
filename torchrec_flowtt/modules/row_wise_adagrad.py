"""Row-wise Adagrad for cores and tables whose gradients arrive dense, as data-parallel ones do."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torchrec_flowtt.functional.cores import accumulation_dtype

__all__ = ["RowWiseAdagrad"]


class RowWiseAdagrad(torch.optim.Optimizer):
    """FBGEMM's exact row-wise Adagrad as a torch optimizer, for parameters of any shape.

    The counterpart of the fused ``EXACT_ROWWISE_ADAGRAD`` for data-parallel tables. A row is
    ``p[i]``: a row of a table [N, D] or a slice of a TT-core [p_k, r, q_k, r']. With G the gradient
    of a row, ``sum += mean(G * G)`` and ``row -= lr * G / (sqrt(sum) + eps)``. A row whose gradient
    is zero stays as it is. Source: the row-wise form, as in FBGEMM, of Duchi, Hazan and Singer,
    "Adaptive Subgradient Methods", JMLR 12 (2011).

    The state of a parameter is ``step``, float32 ``[]``, and ``sum``, ``[p.shape[0]]``, float32
    (float64 for float64 parameters), under the names of ``torch.optim.Adagrad``. ``sum`` holds the
    numbers of the fused optimizer's ``momentum1``.

    Args:
        params: parameters of at least one dimension, or groups of them.
        lr: step size, at least 0.
        eps: added to the denominator, at least 0.
        weight_decay: added, times the parameter, to the gradient of the rows that have one (L2).

    Raises:
        TypeError: a hyper-parameter is no number.
        ValueError: a hyper-parameter is negative or not finite, or a parameter has no dimension.

    >>> p = torch.nn.Parameter(torch.zeros(2, 3))
    >>> p.grad = torch.tensor([[2.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    >>> RowWiseAdagrad([p], lr=0.5).step()
    >>> p.tolist()
    [[-0.5, -0.5, -0.5], [0.0, 0.0, 0.0]]
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 0.01,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        """Builds it; see the class for the arguments."""
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, with settings of its own perhaps."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient; returns what `closure` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict()`` gave; sums keep their precision, unlike torch's own would."""
        self._check_state(state_dict)
        super().load_state_dict(state_dict)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(saved, params, strict=True):
            if key in state_dict["state"]:
                total = state_dict["state"][key]["sum"]
                dtype = accumulation_dtype(p.dtype)
                self.state[p]["sum"] = total.to(p.device, dtype, copy=True)

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for key, p in zip(saved, params, strict=False):  # torch compares their number
            state = state_dict["state"].get(key)
            if state is None:
                continue
            if set(state) != {"step", "sum"}:
                raise ValueError(
                    f"state of parameter {key}: expected 'step' and 'sum', got {sorted(state)}"
                )
            if tuple(state["sum"].shape) != (p.shape[0],):
                raise ValueError(
                    f"state of parameter {key}: sum must have shape ({p.shape[0]},), one number a "
                    f"row, got {tuple(state['sum'].shape)}"
                )

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        dtype = accumulation_dtype(p.dtype)
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["sum"] = p.new_zeros(p.shape[0], dtype=dtype)
        assert p.grad is not None
        if p.grad.layout != torch.strided:
            raise RuntimeError(f"RowWiseAdagrad needs dense gradients, got {p.grad.layout}")
        grad = p.grad.to(dtype)
        elements = math.prod(p.shape[1:])
        row = (-1,) + (1,) * (p.dim() - 1)
        if group["weight_decay"]:
            touched = grad.reshape(p.shape[0], elements).any(dim=1).view(row)
            grad = torch.where(touched, grad + group["weight_decay"] * p, grad)
        state["step"] += 1
        state["sum"] += grad.square().reshape(p.shape[0], elements).mean(dim=1)
        divisor = (state["sum"].sqrt() + group["eps"]).view(row)
        # With eps 0 a row without any gradient so far has the divisor 0.
        p -= torch.where(divisor == 0, 0.0, group["lr"] * grad / divisor)


def _check_group(group: dict[str, Any]) -> None:
    for argument in ("lr", "eps", "weight_decay"):
        value = group[argument]
        if not isinstance(value, Tensor) and not isinstance(value, numbers.Real):
            raise TypeError(f"{argument} must be a number, got {type(value).__name__}")
        if not 0.0 <= float(value) < math.inf:
            raise ValueError(f"{argument} must be finite and at least 0, got {value}")
    for p in group["params"]:
        if p.dim() == 0:
            raise ValueError("params must have at least one dimension, got a scalar parameter")
