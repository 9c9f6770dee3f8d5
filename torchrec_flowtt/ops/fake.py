"""Fake kernels: the outputs' shapes and dtypes, for torch.compile, export and meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrec_flowtt.ops.schemas import NAMESPACE, NO_POOLING


def total_columns(
    cores: Sequence[Tensor], cores_per_table: Sequence[int], feature_table_map: Sequence[int]
) -> int:
    """Columns of the output, ``sum_f D_f``: D of a table is the product of its cores' q_k."""
    dims = []
    first = 0
    for count in cores_per_table:
        dim = 1
        for core in cores[first : first + count]:
            dim *= core.shape[2]
        dims.append(dim)
        first += count
    return sum(dims[table] for table in feature_table_map)


def _tt_embedding_bag(
    cores: Sequence[Tensor],
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    cores_per_table: Sequence[int],
    num_embeddings: Sequence[int],
    feature_table_map: Sequence[int],
    pooling_mode: int,
    output_dtype: torch.dtype,
    allow_tf32: bool,
    deterministic: bool,
) -> Tensor:
    if pooling_mode == NO_POOLING:
        columns = total_columns(cores, cores_per_table, feature_table_map[:1])
        return cores[0].new_empty((indices.numel(), columns), dtype=output_dtype)
    batch_size = (offsets.numel() - 1) // len(feature_table_map)
    columns = total_columns(cores, cores_per_table, feature_table_map)
    return cores[0].new_empty((batch_size, columns), dtype=output_dtype)


def _tt_embedding_bag_packed(cores: Sequence[Tensor], packed: Tensor, *arguments: Any) -> Tensor:
    return _tt_embedding_bag(cores, *arguments)


def _pack_tt_cores(cores: Sequence[Tensor], *_: object) -> Tensor:
    # Which kernels there are for a table, and so how much they pack, only the library knows.
    size = torch.library.get_ctx().new_dynamic_size()
    return cores[0].new_empty((size,), dtype=torch.uint8)


def _repack_tt_cores(*_: object) -> None:
    return None


def _tt_embedding_bag_with_order(cores: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
    # Where there is an order it is longer: only eager execution calls the operator.
    output = _tt_embedding_bag(cores, *arguments)
    return [output, cores[0].new_empty((0,), dtype=torch.uint8)]


def _tt_embedding_bag_backward(
    grad_output: Tensor, cores: Sequence[Tensor], *_: object
) -> list[Tensor]:
    return [core.new_empty(core.shape) for core in cores]


def _tt_embedding_bag_weights_grad(
    grad_output: Tensor, cores: Sequence[Tensor], indices: Tensor, *_: object
) -> Tensor:
    dtype = torch.float64 if cores[0].dtype == torch.float64 else torch.float32
    return cores[0].new_empty((indices.numel(),), dtype=dtype)


def _tt_embedding_bag_backward_update(*_: object) -> None:
    return None


def register() -> None:
    """Registers the fake kernels. Called once, when the package is imported."""
    kernels: dict[str, Callable[..., Any]] = {
        "pack_tt_cores": _pack_tt_cores,
        "repack_tt_cores": _repack_tt_cores,
        "tt_embedding_bag": _tt_embedding_bag,
        "tt_embedding_bag_packed": _tt_embedding_bag_packed,
        "tt_embedding_bag_with_order": _tt_embedding_bag_with_order,
        "tt_embedding_bag_backward": _tt_embedding_bag_backward,
        "tt_embedding_bag_weights_grad": _tt_embedding_bag_weights_grad,
        "tt_embedding_bag_backward_update": _tt_embedding_bag_backward_update,
    }
    for name, kernel in kernels.items():
        torch.library.register_fake(f"{NAMESPACE}::{name}", kernel)
