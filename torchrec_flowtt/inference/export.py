"""Export of a model with TT tables by ``torch.export``, for AOTInductor for example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

__all__ = ["TensorInputs", "export_with_dynamic_batch"]

# Bounds of the dynamic sizes, which keep products of them in int64.
_MAX_BATCH_SIZE = 1 << 24
_MAX_LOOKUPS = 1 << 31


class TensorInputs(nn.Module):
    """A model of a ``KeyedJaggedTensor``, called with the tensors that one consists of.

    A program in C++ has plain tensors, and no ``KeyedJaggedTensor``.

    Args:
        model: a module whose first argument is a ``KeyedJaggedTensor``; further ones are tensors.
        keys: names of the F features, in the order in which the tensors have them.
        is_weighted: whether there are per-sample weights.

    >>> from torchrec_flowtt import FlowTTEmbeddingBagCollection, FlowTTEmbeddingBagConfig
    >>> ebc = FlowTTEmbeddingBagCollection(tables=[
    ...     FlowTTEmbeddingBagConfig(name="t1", num_embeddings=1000, embedding_dim=4,
    ...                              feature_names=["f1"], tt_ranks=2)])
    >>> TensorInputs(ebc, ["f1"])(torch.tensor([0, 1, 2]), torch.tensor([[2, 0, 1]])).shape
    torch.Size([3, 4])
    """

    def __init__(self, model: nn.Module, keys: Sequence[str], is_weighted: bool = False) -> None:
        """Builds it; see the class for the arguments."""
        super().__init__()
        if isinstance(keys, str):
            raise TypeError(f"keys must have one string a feature, got a single string, {keys!r}")
        self.model = model
        self.keys = list(keys)
        self.is_weighted = is_weighted

    def forward(self, values: Tensor, lengths: Tensor, *others: Tensor) -> Any:
        """Calls the model.

        Args:
            values: ids of all features, feature after feature, int32 or int64, ``[nnz]``.
            lengths: of the bags, int32 or int64, ``[F, B]``. With a dimension that is the batch
                size itself a compiler need not solve ``F * B`` for it, which AOTInductor of torch
                2.13 does in floating point, and misses the batch size for some F.
            others: with `is_weighted` first the weights, ``[nnz]``; then the model's other
                arguments.

        Returns:
            What the model returns; of a ``KeyedTensor`` its values, ``[B, sum_f D_f]``.

        Raises:
            ValueError: `lengths` has another shape, or weights are missing.
        """
        if lengths.dim() != 2 or lengths.shape[0] != len(self.keys):
            raise ValueError(
                f"lengths must be [F, B] with F = {len(self.keys)} keys, got shape "
                f"{tuple(lengths.shape)}"
            )
        if self.is_weighted and not others:
            raise ValueError("weights expected behind lengths, as is_weighted=True, got none")
        weights = others[0] if self.is_weighted else None
        features = KeyedJaggedTensor(self.keys, values, weights, lengths.reshape(-1))
        output = self.model(features, *others[int(self.is_weighted) :])
        return output.values() if isinstance(output, KeyedTensor) else output


def export_with_dynamic_batch(
    model: TensorInputs, inputs: tuple[Tensor, ...], *, strict: bool = False
) -> ExportedProgram:
    """Exports a model for any batch size from 1 on, and any number of lookups from 0 on.

    It is ``torch.export.export`` with the dynamic sizes of such a model.

    Args:
        model: the model; its parameters become part of the program. It is exported without
            gradients and in the mode that it has: call ``eval()`` before.
        inputs: an example of what `model` is called with, at least 2 samples and 2 lookups. Tensors
            behind `values`, `lengths` and weights have the batch as their first dimension.
        strict: as for ``torch.export.export``.

    Returns:
        The program. Its operators include ``torch.ops.flowtt``: ``import torchrec_flowtt.ops`` in
        the process that loads it.

    Raises:
        TypeError: `model` is no :class:`TensorInputs`.
        ValueError: the example is too small, or sizes in it do not fit.
    """
    if not isinstance(model, TensorInputs):
        raise TypeError(f"model must be a TensorInputs, got {type(model).__name__}")
    needed = 2 + int(model.is_weighted)
    if len(inputs) < needed:
        names = "values, lengths and weights" if model.is_weighted else "values and lengths"
        raise ValueError(f"inputs must be {names}, got {len(inputs)} tensors")
    values, lengths, *others = inputs
    features = len(model.keys)
    if lengths.dim() != 2 or lengths.shape[0] != features:
        raise ValueError(
            f"inputs[1], the lengths, must be 2-D with a row for each of the {features} keys, got "
            f"shape {tuple(lengths.shape)}"
        )
    batch_size = lengths.shape[1]
    if batch_size < 2 or values.numel() < 2:
        raise ValueError(
            "inputs must have at least 2 samples and 2 lookups, as sizes of 0 and 1 are taken for "
            f"constants, got {batch_size} and {values.numel()}"
        )
    if not lengths.is_meta and int(lengths.sum()) != values.numel():
        raise ValueError(
            f"inputs[0], the values, must be as many as the lengths add up to, "
            f"{int(lengths.sum())}, got {values.numel()}"
        )
    batch = Dim("batch_size", min=1, max=_MAX_BATCH_SIZE)
    lookups = Dim("lookups", min=0, max=_MAX_LOOKUPS)
    of_others: list[dict[int, Any]] = [{0: batch} for _ in others]
    for number, tensor in enumerate(others):
        is_weights = model.is_weighted and number == 0
        if is_weights:
            of_others[0] = {0: lookups}
        expected = values.numel() if is_weights else batch_size
        if tensor.dim() == 0 or tensor.shape[0] != expected:
            raise ValueError(
                f"inputs[{number + 2}] must have {expected} as first dimension, "
                f"{'a weight for each lookup' if is_weights else 'the batch size'}, got shape "
                f"{tuple(tensor.shape)}"
            )
    dynamic_shapes: tuple[Any, ...] = ({0: lookups}, {1: batch})
    if others:
        dynamic_shapes += (tuple(of_others),)
    with torch.no_grad():
        return torch.export.export(
            model, tuple(inputs), dynamic_shapes=dynamic_shapes, strict=strict
        )
