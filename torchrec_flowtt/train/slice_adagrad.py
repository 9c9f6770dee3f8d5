"""Row-wise Adagrad for replicated tables, whose gradients arrive dense."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class SliceAdagrad(torch.optim.Optimizer):
    """FBGEMM's exact row-wise Adagrad on dense gradients, for parameters of any shape.

    A row is ``p[i]``: a row of a table [N, D] or a slice of a TT-core [p_k, r, q_k, r']. With G the
    gradient of a row, ``m += mean(G * G)`` and ``row -= lr * G / (sqrt(m) + eps)``. A row without a
    gradient stays as it is. Source: the row-wise form, as in FBGEMM, of Duchi,
    Hazan and Singer, "Adaptive Subgradient Methods", JMLR 12 (2011).

    >>> p = torch.nn.Parameter(torch.zeros(2, 3))
    >>> p.grad = torch.tensor([[2.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    >>> SliceAdagrad([p], lr=0.5).step()
    >>> p.tolist()
    [[-0.5, -0.5, -0.5], [0.0, 0.0, 0.0]]
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        """``weight_decay`` is added to the gradient of the rows that have one (L2)."""
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum1"] = p.new_zeros(p.shape[0], dtype=torch.float32)
                self._update(p, p.grad.float(), state["momentum1"], group)

    @staticmethod
    def _update(
        p: torch.Tensor, grad: torch.Tensor, momentum1: torch.Tensor, group: dict[str, Any]
    ) -> None:
        row = (-1,) + (1,) * (p.dim() - 1)
        if group["weight_decay"]:
            touched = grad.flatten(1).any(dim=1).view(row)
            grad = torch.where(touched, grad + group["weight_decay"] * p, grad)
        momentum1 += grad.square().flatten(1).mean(dim=1)
        p -= group["lr"] * grad / (momentum1.sqrt() + group["eps"]).view(row)
