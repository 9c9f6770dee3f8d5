"""Pooled lookups in TT tables, called as torch's `embedding_bag` and as FBGEMM's TBE."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

import torchrec_flowtt.ops  # noqa: F401  (registers the operators)
from torchrec_flowtt.functional.cores import (
    accumulation_dtype,
    check_cores,
    checked_num_embeddings,
    embedding_dim,
    padded_num_embeddings,
)
from torchrec_flowtt.functional.fused_update import FusedUpdate, fused_lookup
from torchrec_flowtt.functional.lookup import BatchedLookup, look_up
from torchrec_flowtt.functional.packed_cores import PackedCores
from torchrec_flowtt.functional.pooling import PoolingMode
from torchrec_flowtt.shapes.arguments import checked_integer

__all__ = [
    "batched_lookup",
    "check_integers",
    "checked_output_dtype",
    "table_batched_tt_embedding_bag",
    "tt_embedding_bag",
]


def tt_embedding_bag(
    indices: Tensor,
    cores: Sequence[Tensor],
    offsets: Tensor | None = None,
    *,
    num_embeddings: int | None = None,
    mode: str | PoolingMode = "mean",
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    output_dtype: torch.dtype | None = None,
    packed: PackedCores | None = None,
) -> Tensor:
    """Sums or averages bags of rows of one TT table without reconstructing the table.

    Unlike with `torch.nn.functional.embedding_bag`, weights may be used with the mean (the weighted
    sum divided by the bag's length, as FBGEMM does), and an index outside the table is always an
    error. Autocast does not change the result: sums are formed in
    float32 (float64 for float64 cores) and rounded to `output_dtype` once.

    Args:
        indices: row indices, int32 or int64: ``[nnz]`` with `offsets`, or ``[B, L]``, B bags of L
            rows each, without.
        cores: TT-cores ``[p_k, r_(k-1), q_k, r_k]`` of one dtype: float32, float16, bfloat16 or
            float64.
        offsets: start of each bag in `indices`, int32 or int64, ``[B]``, or ``[B + 1]`` with
            `include_last_offset`. Empty bags give zeros.
        num_embeddings: N, rows of the table; default all that the cores can represent.
        mode: ``"sum"`` or ``"mean"``, the default as in torch.
        per_sample_weights: a factor for each row, shaped as `indices`, floating. Differentiable.
        include_last_offset: whether `offsets` ends with nnz.
        output_dtype: dtype of the result; default the cores'. float64 for float64 cores only.
        packed: what keeps packed copies of `cores` for lookups without a gradient on CUDA.

    Returns:
        ``[B, D]``.

    Raises:
        TypeError: a dtype does not fit, or N is no integer.
        ValueError: a shape, the mode, N or a device does not fit.
        IndexError: an index is outside ``[0, N)``; on CUDA the kernel reports it and stops.

    >>> g1, g2 = torch.rand(2, 1, 3, 2), torch.rand(4, 2, 2, 1)
    >>> indices, offsets = torch.tensor([1, 5, 5]), torch.tensor([0, 2, 3])
    >>> tt_embedding_bag(indices, [g1, g2], offsets).shape
    torch.Size([3, 6])
    """
    check_cores(cores)
    check_integers(indices, "indices")
    num_embeddings = checked_num_embeddings(cores, num_embeddings)
    if per_sample_weights is not None:
        _check_weights(per_sample_weights, indices)
    if indices.dim() == 2:
        if offsets is not None:
            raise ValueError(
                "offsets must be None when indices is 2-D, as its rows are the bags, "
                f"got offsets of shape {tuple(offsets.shape)}"
            )
        bags, length = indices.shape
        offsets = torch.arange(bags + 1, device=indices.device) * length
        indices = indices.reshape(-1)
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.reshape(-1)
    elif indices.dim() == 1:
        if offsets is None:
            raise ValueError("offsets must be a 1-D tensor when indices is 1-D, got None")
        offsets = _closed_offsets(offsets, indices, include_last_offset)
    else:
        raise ValueError(f"indices must be 1-D or 2-D, got shape {tuple(indices.shape)}")
    return batched_lookup(
        indices,
        offsets,
        per_sample_weights,
        cores,
        BatchedLookup(
            cores_per_table=[len(cores)],
            num_embeddings=[num_embeddings],
            feature_table_map=[0],
            pooling_mode=int(PoolingMode.of_bags(mode)),
            output_dtype=checked_output_dtype(output_dtype, cores[0].dtype),
        ),
        packed=packed,
    )


def table_batched_tt_embedding_bag(
    indices: Tensor,
    offsets: Tensor,
    cores: Sequence[Sequence[Tensor]],
    *,
    num_embeddings: Sequence[int],
    feature_table_map: Sequence[int],
    pooling_mode: int | str | PoolingMode,
    per_sample_weights: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    update: FusedUpdate | None = None,
    packed: PackedCores | None = None,
) -> Tensor:
    """Looks up F features in T TT tables in one call; bags as in FBGEMM's TBE.

    Args:
        indices: row indices of all features, feature after feature, int32 or int64, ``[nnz]``.
        offsets: bag (f, b) is ``indices[offsets[f * B + b] : offsets[f * B + b + 1]]``; int32 or
            int64, ``[F * B + 1]``.
        cores: for each table its TT-cores; all of one dtype on one device. Tables may differ in
            everything else.
        num_embeddings: N of each table.
        feature_table_map: table of each feature; several features may share one.
        pooling_mode: sum or mean, or none, for all features. Without pooling all tables have one D,
            and bags matter only in that they tell the features apart.
        per_sample_weights: a factor for each row, ``[nnz]``, floating. Differentiable. Must be None
            without pooling.
        output_dtype: dtype of the result; default the cores'.
        update: when given, backward applies this optimizer step to the cores once, for all
            features together, instead of returning their gradients. Every core must then require
            a gradient, which anchors the call in the autograd graph; without gradient mode, or if
            no core requires one, nothing is updated.
        packed: what keeps packed copies of `cores` for lookups without a gradient on CUDA.

    Returns:
        ``[B, D_0 + D_1 + ..]``, the features' columns side by side; without pooling ``[nnz, D]``,
        row i of which is the row `indices[i]` of its feature's table.

    Raises:
        TypeError: a dtype does not fit, or an N or a table number is no integer.
        ValueError: a shape, length, table number, mode or device does not fit.
        IndexError: an index is outside its table; on CUDA the kernel reports it and stops.

    >>> ads = [torch.rand(2, 1, 3, 2), torch.rand(4, 2, 2, 1)]
    >>> users = [torch.rand(3, 1, 2, 2), torch.rand(3, 2, 2, 1)]
    >>> indices, offsets = torch.tensor([7, 0, 8, 8]), torch.tensor([0, 1, 2, 2, 4])
    >>> table_batched_tt_embedding_bag(
    ...     indices, offsets, [ads, users], num_embeddings=[8, 9], feature_table_map=[0, 1],
    ...     pooling_mode="sum",
    ... ).shape
    torch.Size([2, 10])
    """
    if len(cores) == 0 or len(cores) != len(num_embeddings):
        raise ValueError(
            "num_embeddings must have one entry a table, of at least one table, "
            f"got {len(num_embeddings)} for {len(cores)} tables of cores"
        )
    num_embeddings = [
        checked_integer(rows, f"num_embeddings[{table}]")
        for table, rows in enumerate(num_embeddings)
    ]
    feature_table_map = [
        checked_integer(table, f"feature_table_map[{feature}]")
        for feature, table in enumerate(feature_table_map)
    ]
    mode = PoolingMode.of(pooling_mode)
    for table, (table_cores, rows) in enumerate(zip(cores, num_embeddings, strict=True)):
        check_cores(table_cores, f"cores[{table}]")
        if not 0 < rows <= padded_num_embeddings(table_cores):
            raise ValueError(
                f"num_embeddings[{table}] must be 1 to {padded_num_embeddings(table_cores)}, the "
                f"product of the first dimensions of cores[{table}], got {rows}"
            )
        if table_cores[0].dtype != cores[0][0].dtype:
            raise TypeError(
                f"cores[{table}] must have the dtype of cores[0], {cores[0][0].dtype}, "
                f"got {table_cores[0].dtype}"
            )
        if table_cores[0].device != cores[0][0].device:
            raise ValueError(
                f"cores[{table}] must be on the device of cores[0], {cores[0][0].device}, "
                f"got {table_cores[0].device}"
            )
    for feature, table in enumerate(feature_table_map):
        if not 0 <= table < len(cores):
            raise ValueError(
                f"feature_table_map[{feature}] must name a table, 0 to {len(cores) - 1}, "
                f"got {table}"
            )
    if update is not None:
        if not isinstance(update, FusedUpdate):
            raise TypeError(
                f"update must be a FusedUpdate or None, got {update!r} ({type(update).__name__})"
            )
        update.check([core for table_cores in cores for core in table_cores])
    if len(feature_table_map) == 0:
        raise ValueError("feature_table_map must name a table for at least one feature, got none")
    if mode is PoolingMode.NONE:
        _check_one_dim(cores, feature_table_map)
    lookup = BatchedLookup(
        cores_per_table=[len(table_cores) for table_cores in cores],
        num_embeddings=num_embeddings,
        feature_table_map=feature_table_map,
        pooling_mode=int(mode),
        output_dtype=checked_output_dtype(output_dtype, cores[0][0].dtype),
    )
    flat_cores = [core for table_cores in cores for core in table_cores]
    return batched_lookup(
        indices, offsets, per_sample_weights, flat_cores, lookup, update=update, packed=packed
    )


def batched_lookup(
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    cores: Sequence[Tensor],
    lookup: BatchedLookup,
    *,
    update: FusedUpdate | None = None,
    packed: PackedCores | None = None,
) -> Tensor:
    """The part of :func:`table_batched_tt_embedding_bag` that depends on the batch.

    For callers that checked `lookup` once and for all. `cores` is the flat list, table after
    table; `lookup.output_dtype` must suit them.
    """
    _refuse_forward_mode(cores, per_sample_weights)
    if not torch.compiler.is_compiling():
        _refuse_transforms(cores, per_sample_weights, update)
    if packed is not None and not isinstance(packed, PackedCores):
        raise TypeError(
            f"packed must be a PackedCores or None, got {packed!r} ({type(packed).__name__})"
        )
    check_integers(indices, "indices")
    check_integers(offsets, "offsets")
    num_features = len(lookup.feature_table_map)
    if indices.dim() != 1:
        raise ValueError(f"indices must be 1-D, got shape {tuple(indices.shape)}")
    if offsets.dim() != 1 or offsets.numel() == 0 or (offsets.numel() - 1) % num_features != 0:
        raise ValueError(
            f"offsets must be 1-D with F * B + 1 elements for the F = {num_features} features, "
            f"got shape {tuple(offsets.shape)}"
        )
    if per_sample_weights is not None:
        if lookup.pooling_mode == PoolingMode.NONE:
            raise ValueError(
                "per_sample_weights must be None without pooling (pooling mode 'none'), which "
                "returns the rows themselves, got a tensor"
            )
        _check_weights(per_sample_weights, indices)
        per_sample_weights = per_sample_weights.to(accumulation_dtype(cores[0].dtype)).contiguous()
    _check_device(cores[0].device, indices, "indices")
    _check_device(cores[0].device, offsets, "offsets")
    _check_device(cores[0].device, per_sample_weights, "per_sample_weights")
    indices, offsets = indices.contiguous(), offsets.contiguous()
    if update is not None and torch.is_grad_enabled():
        anchored = sum(core.requires_grad for core in cores)
        if anchored == len(cores):
            output: Tensor = fused_lookup(
                lookup, update, indices, offsets, per_sample_weights, cores
            )
            return output
        if anchored > 0:
            frozen = next(k for k, core in enumerate(cores) if not core.requires_grad)
            table, core = _place_of_core(frozen, lookup.cores_per_table)
            raise ValueError(
                "cores must all require a gradient, or none of them, when an optimizer step is "
                f"fused into backward, as it updates them together; got {anchored} of "
                f"{len(cores)} that do, but not core {core} of table {table}; a table that is to "
                "be frozen alone needs a lookup of its own"
            )
    return look_up(lookup, indices, offsets, per_sample_weights, cores, packed)


def _place_of_core(number: int, cores_per_table: Sequence[int]) -> tuple[int, int]:
    """Table and core of an element of the flat list."""
    for table, count in enumerate(cores_per_table):
        if number < count:
            return table, number
        number -= count
    raise IndexError(f"there is no core {number} behind the last table's")


def checked_output_dtype(output_dtype: torch.dtype | None, cores_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the result: `output_dtype`, or the cores' where it is None.

    Raises:
        TypeError: the operators cannot write `output_dtype` from cores of `cores_dtype`.
    """
    if output_dtype is None:
        return cores_dtype
    valid = (
        (torch.float64,)
        if cores_dtype == torch.float64
        else (torch.float32, torch.float16, torch.bfloat16)
    )
    if output_dtype not in valid:
        names = ", ".join(str(dtype) for dtype in valid)
        raise TypeError(
            f"output_dtype must be one of {names} for cores of {cores_dtype}, got {output_dtype}"
        )
    return output_dtype


def _check_one_dim(cores: Sequence[Sequence[Tensor]], feature_table_map: Sequence[int]) -> None:
    first = feature_table_map[0]
    for table in feature_table_map:
        if embedding_dim(cores[table]) != embedding_dim(cores[first]):
            raise ValueError(
                "cores must have one embedding dimension without pooling (pooling mode 'none'), as "
                f"every lookup is a row of the result, but table {first} has "
                f"{embedding_dim(cores[first])} and table {table} has {embedding_dim(cores[table])}"
            )


def _closed_offsets(offsets: Tensor, indices: Tensor, include_last_offset: bool) -> Tensor:
    """`offsets` with nnz at its end."""
    check_integers(offsets, "offsets")
    if offsets.dim() != 1:
        raise ValueError(f"offsets must be 1-D, got shape {tuple(offsets.shape)}")
    if include_last_offset:
        if offsets.numel() == 0:
            raise ValueError(
                "offsets must have at least one element with include_last_offset, got none"
            )
        return offsets
    # A fill on the device: nnz is known to the host, and no copy has to wait for the other side.
    return torch.cat([offsets, offsets.new_full((1,), indices.numel())])


def _refuse_forward_mode(cores: Sequence[Tensor], per_sample_weights: Tensor | None) -> None:
    # Without this the tangents would be dropped silently. The level is asked first, as most calls
    # are in none and asking every core costs time.
    if forward_ad._current_level < 0:
        return
    inputs = cores if per_sample_weights is None else [*cores, per_sample_weights]
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in inputs):
        raise NotImplementedError(
            "TT embedding lookups have no forward-mode derivative: use reverse mode (backward, "
            "torch.func.grad of functional.rows), or torchrec_flowtt.functional.rows, which is "
            "plain torch"
        )


def _refuse_transforms(
    cores: Sequence[Tensor], per_sample_weights: Tensor | None, update: FusedUpdate | None
) -> None:
    # Their own message is about how to write an autograd.Function.
    if not torch._C._are_functorch_transforms_active() or not torch.is_grad_enabled():
        return
    inputs = cores if per_sample_weights is None else [*cores, per_sample_weights]
    if update is not None or any(map(torch._C._functorch.is_functorch_wrapped_tensor, inputs)):
        raise NotImplementedError(
            "the transforms of torch.func (grad, vjp, vmap) cannot differentiate TT embedding "
            "lookups, nor run those with a fused optimizer: use backward or torch.autograd.grad, "
            "or torchrec_flowtt.functional.rows, which is plain torch"
        )


def check_integers(tensor: Tensor, argument: str) -> None:
    """Refuses what is no int32 or int64 tensor; messages call it `argument`."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{argument} must be a Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{argument} must be int32 or int64, got {tensor.dtype}")


def _check_weights(per_sample_weights: Tensor, indices: Tensor) -> None:
    if not isinstance(per_sample_weights, Tensor):
        raise TypeError(
            f"per_sample_weights must be a Tensor, got {type(per_sample_weights).__name__}"
        )
    if not per_sample_weights.is_floating_point():
        raise TypeError(
            f"per_sample_weights must have a floating-point dtype, got {per_sample_weights.dtype}"
        )
    if per_sample_weights.shape != indices.shape:
        raise ValueError(
            f"per_sample_weights must have the shape of indices, {tuple(indices.shape)}, "
            f"got {tuple(per_sample_weights.shape)}"
        )


def _check_device(device: torch.device, tensor: Tensor | None, argument: str) -> None:
    if tensor is not None and tensor.device != device:
        raise ValueError(
            f"{argument} must be on the device of the TT-cores, {device}, got {tensor.device}"
        )
