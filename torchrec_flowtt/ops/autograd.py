"""Autograd of ``tt_embedding_bag``: gradients of the cores and of the per-sample weights.

The gradients are themselves operators without a derivative, so differentiating twice is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_flowtt.ops.schemas import NAMESPACE

_ARGUMENTS_WITHOUT_GRADIENT = 7  # cores_per_table to deterministic


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    cores, indices, offsets, per_sample_weights = inputs[:4]
    ctx.save_for_backward(indices, offsets, per_sample_weights, *cores)
    ctx.bag_arguments = inputs[4:8]
    ctx.allow_tf32, ctx.deterministic = inputs[9:11]


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    bags, cores = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
    core_grads, weights_grad = gradients(
        (grad_output, cores, *bags, *ctx.bag_arguments),
        any(ctx.needs_input_grad[0]),
        ctx.needs_input_grad[3],
        ctx.allow_tf32,
        ctx.deterministic,
    )
    return (core_grads, None, None, weights_grad, *[None] * _ARGUMENTS_WITHOUT_GRADIENT)


def gradients(
    arguments: tuple[Any, ...],
    of_cores: bool,
    of_weights: bool,
    allow_tf32: bool,
    deterministic: bool,
    order: Tensor | None = None,
) -> tuple[Sequence[Tensor | None], Tensor | None]:
    """Those that are asked for, of the cores and of the per-sample weights; None for the others.

    Args:
        arguments: of ``tt_embedding_bag_weights_grad``, which ``tt_embedding_bag_backward`` has
            too: the gradient of the output, the cores, and the bags.
        of_cores: whether the cores' are.
        of_weights: whether the weights' is.
        allow_tf32: see `torchrec_flowtt.ops.schemas`.
        deterministic: see there.
        order: see there.
    """
    ops = torch.ops.flowtt
    core_grads: Sequence[Tensor | None] = [None] * len(arguments[1])
    if of_cores:
        core_grads = ops.tt_embedding_bag_backward(*arguments, allow_tf32, order, deterministic)
    weights_grad = ops.tt_embedding_bag_weights_grad(*arguments) if of_weights else None
    return core_grads, weights_grad


def _no_second_derivative(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "flowtt::tt_embedding_bag can be differentiated once only: second derivatives of TT "
        "embedding lookups are not implemented. Call backward() without create_graph=True, or "
        "use torchrec_flowtt.functional.rows, which is plain torch."
    )


def _no_derivative(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "flowtt::tt_embedding_bag_packed has no derivative: packed cores are a copy, for lookups "
        "without a gradient. Call flowtt::tt_embedding_bag, or look up under torch.no_grad()."
    )


def register() -> None:
    """Registers the derivatives. Called once, when the package is imported."""
    torch.library.register_autograd(
        f"{NAMESPACE}::tt_embedding_bag", _backward, setup_context=_setup_context
    )
    torch.library.register_autograd(f"{NAMESPACE}::tt_embedding_bag_packed", _no_derivative)
    for name in ("tt_embedding_bag_backward", "tt_embedding_bag_weights_grad"):
        torch.library.register_autograd(f"{NAMESPACE}::{name}", _no_second_derivative)
