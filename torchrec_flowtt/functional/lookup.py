"""The forward operator, and its backward with dense gradients of the cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_flowtt.functional.packed_cores import PackedCores
from torchrec_flowtt.functional.torch_settings import determinism_required, tf32_allowed
from torchrec_flowtt.ops.autograd import gradients

__all__ = ["BatchedLookup", "look_up", "look_up_with_order"]


@dataclasses.dataclass(frozen=True)
class BatchedLookup:
    """The arguments of the operators that are no tensors; see `torchrec_flowtt.ops`."""

    cores_per_table: list[int]
    num_embeddings: list[int]
    feature_table_map: list[int]
    pooling_mode: int
    output_dtype: torch.dtype

    @property
    def shape_arguments(self) -> tuple[list[int], list[int], list[int], int]:
        """Those that every operator has."""
        return (
            self.cores_per_table,
            self.num_embeddings,
            self.feature_table_map,
            self.pooling_mode,
        )


def look_up(
    lookup: BatchedLookup,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    cores: Sequence[Tensor],
    packed: PackedCores | None = None,
) -> Tensor:
    """The lookup, without checks; differentiable once.

    In eager execution the backward has the order into which the forward has sorted the lookups, and
    one without a gradient takes `packed`; a graph of ``torch.compile`` has the plain operators.
    """
    tensors = cores if per_sample_weights is None else (*cores, per_sample_weights)
    is_differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    is_eager = not torch.compiler.is_compiling()
    output: Tensor
    if is_differentiated and is_eager:
        output, _ = _OrderedLookup.apply(lookup, indices, offsets, per_sample_weights, *cores)
        return output
    arguments = _forward_arguments(lookup, indices, offsets, per_sample_weights, cores)
    kept = packed.current(cores, lookup) if packed is not None and is_eager else None
    if kept is not None:
        output = torch.ops.flowtt.tt_embedding_bag_packed(cores, kept, *arguments[1:])
    else:
        output = torch.ops.flowtt.tt_embedding_bag(*arguments)
    return output


def look_up_with_order(
    lookup: BatchedLookup,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    cores: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """The lookup without a derivative, and the order of the lookups for a backward operator."""
    output, order = torch.ops.flowtt.tt_embedding_bag_with_order(
        *_forward_arguments(lookup, indices, offsets, per_sample_weights, cores)
    )
    return output, order


def _forward_arguments(
    lookup: BatchedLookup,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    cores: Sequence[Tensor],
) -> tuple[Any, ...]:
    return (
        cores,
        indices,
        offsets,
        per_sample_weights,
        *lookup.shape_arguments,
        lookup.output_dtype,
        tf32_allowed(),
        determinism_required(),
    )


class _OrderedLookup(torch.autograd.Function):
    """As the derivative of the operator (`torchrec_flowtt.ops.autograd`), with the order kept."""

    @staticmethod
    def forward(
        lookup: BatchedLookup,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
        *cores: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return look_up_with_order(lookup, indices, offsets, per_sample_weights, cores)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        lookup, indices, offsets, per_sample_weights, *cores = inputs
        _, order = output
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(indices, offsets, per_sample_weights, order, *cores)
        ctx.lookup = lookup
        ctx.allow_tf32 = tf32_allowed()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        indices, offsets, per_sample_weights, order, *cores = ctx.saved_tensors
        bags = (indices, offsets, per_sample_weights, *ctx.lookup.shape_arguments)
        core_grads, weights_grad = gradients(
            (grad_outputs[0], cores, *bags),
            any(ctx.needs_input_grad[4:]),
            ctx.needs_input_grad[3],
            ctx.allow_tf32,
            # As torch's own operators, the setting of the backward pass.
            determinism_required(),
            order,
        )
        return (None, None, None, weights_grad, *core_grads)
