"""Lookup whose backward applies the optimizer step in place of returning gradients of the cores."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_flowtt.functional.cores import accumulation_dtype
from torchrec_flowtt.functional.lookup import BatchedLookup, look_up_with_order
from torchrec_flowtt.functional.torch_settings import determinism_required, tf32_allowed

__all__ = ["FusedUpdate", "fused_lookup"]

#: Optimizers that can be fused, and how many state tensors each core has with them.
_MOMENTS = {"exact_sgd": 0, "exact_adagrad": 1, "exact_row_wise_adagrad": 1, "adam": 2}


@dataclasses.dataclass(frozen=True)
class FusedUpdate:
    """State and hyper-parameters of an optimizer that steps inside the backward pass.

    Semantics and defaults are those of FBGEMM's table-batched embeddings, with one core slice
    ``G_k[i_k]`` in the role of a row: one step per backward on the gradient summed over the batch,
    applied only to slices that were looked up.

    Args:
        optimizer: ``"exact_sgd"``, ``"exact_adagrad"``, ``"exact_row_wise_adagrad"``, ``"adam"``.
        learning_rate: 0-dim float32 tensor on the cores' device.
        iter: 0-dim int64 tensor on the cores' device, the number of steps done; incremented by
            every backward.
        momentum1: one tensor a core, or empty for SGD: shaped as the core for Adagrad and Adam,
            ``[p_k]`` for row-wise Adagrad. float32 (float64 for float64 cores).
        momentum2: one tensor a core shaped as the core for Adam, else empty.
        eps: added to the denominator of Adagrad and Adam.
        beta1: decay of Adam's first moment.
        beta2: decay of Adam's second moment.
        weight_decay: decoupled weight decay of Adam.
        stochastic_rounding: of fp16 and bf16 cores on CUDA: whether a stepped value is rounded up
            or down at random, so that steps smaller than the distance of two values are not lost.
        gradient_clipping: whether every element of the gradient of the output is brought into
            ``[-max_gradient, max_gradient]`` before anything is computed from it.
        max_gradient: at least 0; without effect unless gradient_clipping is set.

    Raises:
        TypeError: a tensor or a number is something else.
        ValueError: the optimizer is unknown, it has other moments than those given, or an argument
            is out of range.
    """

    optimizer: str
    learning_rate: Tensor
    iter: Tensor
    momentum1: Sequence[Tensor] = ()
    momentum2: Sequence[Tensor] = ()
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    stochastic_rounding: bool = True
    gradient_clipping: bool = False
    max_gradient: float = 1.0

    def __post_init__(self) -> None:
        """Validates all that does not depend on the cores."""
        moments = _MOMENTS.get(self.optimizer) if isinstance(self.optimizer, str) else None
        if moments is None:
            valid = ", ".join(repr(name) for name in _MOMENTS)
            raise ValueError(f"optimizer must be one of {valid}, got {self.optimizer!r}")
        for name, dtype in (("learning_rate", torch.float32), ("iter", torch.int64)):
            value = getattr(self, name)
            if not isinstance(value, Tensor):
                raise TypeError(f"{name} must be a 0-dim {dtype} tensor, got {value!r}")
            if value.dtype != dtype or value.dim() != 0:
                raise ValueError(
                    f"{name} must be a 0-dim {dtype} tensor, got {value.dtype} of shape "
                    f"{tuple(value.shape)}"
                )
        for argument in ("eps", "beta1", "beta2", "weight_decay", "max_gradient"):
            number = getattr(self, argument)
            if not isinstance(number, numbers.Real):
                kind = type(number).__name__
                raise TypeError(f"{argument} must be a real number, got {number!r} ({kind})")
            upper = 1.0 if argument in ("beta1", "beta2") else math.inf
            if not 0.0 <= float(number) < upper:
                limit = "in [0, 1)" if upper == 1.0 else "finite and at least 0"
                raise ValueError(f"{argument} must be {limit}, got {number}")
        for moment, states in ((1, self.momentum1), (2, self.momentum2)):
            if (len(states) > 0) != (moment <= moments):
                expected = "one tensor a core" if moment <= moments else "no tensors"
                raise ValueError(
                    f"momentum{moment} must hold {expected} for optimizer {self.optimizer!r}, "
                    f"got {len(states)}"
                )

    def check(self, cores: Sequence[Tensor]) -> None:
        """Refuses state that does not belong to `cores`, the flat list of all tables.

        Raises:
            TypeError: an element of the state is no tensor.
            ValueError: there are more or fewer state tensors than cores, or one has another shape,
                dtype or device, or is not contiguous.
        """
        for moment, states in ((1, self.momentum1), (2, self.momentum2)):
            if len(states) not in (0, len(cores)):
                raise ValueError(
                    f"momentum{moment} must hold one tensor a core, {len(cores)}, got {len(states)}"
                )
            for k, (state, core) in enumerate(zip(states, cores, strict=False)):
                if not isinstance(state, Tensor):
                    raise TypeError(
                        f"momentum{moment}[{k}] must be a Tensor, got {type(state).__name__}"
                    )
                by_slice = self.optimizer == "exact_row_wise_adagrad"
                shape = core.shape[:1] if by_slice else core.shape
                dtype = accumulation_dtype(core.dtype)
                if state.shape != shape or state.dtype != dtype or not state.is_contiguous():
                    raise ValueError(
                        f"momentum{moment}[{k}] must be contiguous, of {dtype} and of shape "
                        f"{tuple(shape)}, as core {k} is {core.dtype} of shape "
                        f"{tuple(core.shape)}; got {state.dtype} of shape {tuple(state.shape)} and "
                        f"strides {state.stride()}"
                    )
        _refuse_other_devices(self, cores)


class _FusedLookup(torch.autograd.Function):
    """One node for all tables and features, so that a table shared by features steps once."""

    @staticmethod
    def forward(
        ctx: Any,
        lookup: BatchedLookup,
        update: FusedUpdate,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
        *cores: Tensor,
    ) -> Tensor:
        ctx.lookup, ctx.update = lookup, update
        # Not saved through autograd: its version check would refuse a second forward that is
        # queued before the first one's backward, as pipelined training does.
        ctx.cores = cores
        output, order = look_up_with_order(lookup, indices, offsets, per_sample_weights, cores)
        ctx.save_for_backward(indices, offsets, per_sample_weights, order)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward(create_graph=True) through a TT table with a fused optimizer: the step "
                "updates the TT-cores in place, so second derivatives do not exist; use the "
                "optimizer 'none' and plain torch (functional.to_dense) for them"
            )
        (grad_output,) = grad_outputs
        unused = (None,) * len(ctx.cores)
        if grad_output is None:
            return (None, None, None, None, None, *unused)
        indices, offsets, per_sample_weights, order = ctx.saved_tensors
        lookup, update = ctx.lookup, ctx.update
        if update.gradient_clipping:
            # torch refuses a bound that the gradient's dtype cannot represent.
            bound = min(update.max_gradient, torch.finfo(grad_output.dtype).max)
            grad_output = grad_output.clamp(-bound, bound)
        weights_grad = None
        if ctx.needs_input_grad[4]:
            # Before the step: the derivative belongs to the cores of the forward pass.
            weights_grad = torch.ops.flowtt.tt_embedding_bag_weights_grad(
                grad_output,
                ctx.cores,
                indices,
                offsets,
                per_sample_weights,
                *lookup.shape_arguments,
            )
        torch.ops.flowtt.tt_embedding_bag_backward_update(
            grad_output,
            ctx.cores,
            update.momentum1,
            update.momentum2,
            indices,
            offsets,
            per_sample_weights,
            *lookup.shape_arguments,
            update.learning_rate,
            update.iter,
            update.optimizer,
            update.eps,
            update.beta1,
            update.beta2,
            update.weight_decay,
            tf32_allowed(),
            order,
            update.stochastic_rounding,
            determinism_required(),
        )
        # The operator cannot tell autograd itself that it wrote to the cores.
        torch.autograd.graph.increment_version(ctx.cores)
        return (None, None, None, None, weights_grad, *unused)


def _refuse_other_devices(update: FusedUpdate, cores: Sequence[Tensor]) -> None:
    device = cores[0].device
    for name in ("learning_rate", "iter", "momentum1", "momentum2"):
        value = getattr(update, name)
        for state in (value,) if isinstance(value, Tensor) else value:
            # State without memory has a message of its own, in the lookup.
            if state.device != device and not state.is_meta:
                raise ValueError(
                    f"{name} must be on the cores' device, {device}, got {state.device}"
                )


def _refuse_strides(cores: Sequence[Tensor]) -> None:
    for number, core in enumerate(cores):
        if not core.is_contiguous():
            raise ValueError(
                f"cores must be contiguous when an optimizer step is fused into backward, which "
                f"writes to them in place, but core {number} of shape {tuple(core.shape)} has the "
                f"strides {core.stride()}: set core.data = core.data.contiguous()"
            )


def _refuse_meta(update: FusedUpdate) -> None:
    for name in ("learning_rate", "iter", "momentum1", "momentum2"):
        value = getattr(update, name)
        for state in (value,) if isinstance(value, Tensor) else value:
            if state.is_meta:
                raise ValueError(
                    f"{name} is on the meta device and the cores are not: no step would be made; "
                    "give a module that was built on the meta device memory by to_empty(device=...)"
                    " before its state is loaded (load_state_dict(assign=True) alone leaves out "
                    "the learning rate)"
                )


@torch.compiler.disable(  # type: ignore[untyped-decorator,unused-ignore]
    reason="the step fused with the backward writes to the cores, which a graph must not repeat"
)
def fused_lookup(
    lookup: BatchedLookup,
    update: FusedUpdate,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    cores: Sequence[Tensor],
) -> Tensor:
    """Looks up like the operator ``flowtt::tt_embedding_bag``; its backward performs `update`.

    Gradients of the cores are not returned (``core.grad`` stays None), those of the weights are.
    Each backward is one step; it differentiates at the cores as they are when it runs.
    ``torch.compile`` leaves the call to eager execution.

    Raises:
        RuntimeError: in a backward with ``create_graph=True``.
        ValueError: a tensor of `update` is on the meta device and the cores are not: torch would
            then compute nothing, and say nothing. Or a core is not contiguous.
    """
    _refuse_strides(cores)
    if not cores[0].is_meta:
        _refuse_meta(update)
    output: Tensor = _FusedLookup.apply(
        lookup, update, indices, offsets, per_sample_weights, *cores
    )
    return output
