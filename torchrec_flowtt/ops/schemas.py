"""Schemas of the operators in namespace ``flowtt``.

Notation: T tables, F features, B batch size, D_f the embedding dimension of feature f's table.

``cores``
    Flat list of TT-cores, table after table; table t has ``cores_per_table[t]`` (2 to 4) of them.
    Core k of a table is ``[p_k, r_{k-1}, q_k, r_k]`` with ``r_0 = r_d = 1``. All cores of a call
    have one dtype (fp32, fp16, bf16; fp64 for gradient checks) and one device.
``indices``, ``offsets``
    int32 or int64 each. ``offsets`` is ``[F * B + 1]``, feature-major: the lookups of bag (f, b)
    are ``indices[offsets[f * B + b] : offsets[f * B + b + 1]]``.
``per_sample_weights``
    ``[nnz]`` in the accumulation dtype (fp32, or fp64 for fp64 cores), or None.
``feature_table_map``
    Table of each feature, ``[F]``; several features may read one table.
``pooling_mode``
    0 sum, 1 mean (the weighted sum divided by the number of lookups), 2 none: every lookup gets its
    own row of the output. All tables then have one D, ``per_sample_weights`` is None, and of
    ``offsets`` only the values ``offsets[f * B]``, between features, matter.
``allow_tf32``
    Whether factors of products may be rounded as TF32 rounds them, to a mantissa of 10 bits, where
    that is faster (relative error about 4e-4 instead of 2e-7, or 5e-6 of gradients). Without effect
    on the CPU.
``deterministic``
    Whether results have to be equal, bit by bit, from run to run. On CUDA that fixes the order of
    the sums over a bag, and of those over the lookups of a core slice, which takes a slower way
    that has no use for ``allow_tf32`` and ``order``; on the CPU they are equal anyway for a given
    number of threads. ``tt_embedding_bag_weights_grad`` has no sums over lookups: its results are
    always equal.

``order``
    Of the lookups, as ``tt_embedding_bag_with_order`` returns it, uint8: what the forward pass has
    sorted need not be sorted again. Empty where there is nothing of use: on the CPU, for small
    calls, and for tables that do not share one launch. It belongs to the same indices, offsets and
    weights, and serves one backward pass at a time; without it results are the same.

``packed``
    What ``pack_tt_cores`` makes of the cores for the kernels of CUDA, uint8: every slice scaled and
    in the order in which the tensor cores take it. It is a copy, which later changes of the cores
    do not reach; ``repack_tt_cores`` brings it up to date in its place. Its size is that of the
    cores (half of it for one product) with what pads them; it depends on the tables, the cores'
    dtype, and, through the number of products, on ``output_dtype`` and ``allow_tf32``, which have
    to be those of the lookup. Empty, and not looked at, on the CPU; tables that only the general
    kernel takes have no part of it.

``stochastic_rounding``
    Whether stepped fp16 and bf16 cores are rounded up or down at random instead of to the nearest,
    so that steps too small for them are not lost. What comes out depends on ``iter``, not on a
    generator. Without effect on the CPU, as in FBGEMM.

``tt_embedding_bag`` returns ``[B, sum_f D_f]``, or ``[nnz, D]`` without pooling;
``tt_embedding_bag_packed`` the same, bit for bit, from ``packed`` instead of packing the cores
again, and has no derivative, to ask for which is an error;
``tt_embedding_bag_with_order`` returns the first and ``order``, and has no derivative;
``tt_embedding_bag_backward`` one dense gradient per core; ``tt_embedding_bag_weights_grad``
``[nnz]``; ``tt_embedding_bag_backward_update`` applies one optimizer step on the gradient summed
over the batch to the core slices that were looked up, and makes ``iter``, the number of steps done,
one more.
No argument of ``tt_embedding_bag`` has a default: an argument equal to its default would vanish
from what autograd sees.
"""

from __future__ import annotations

import torch

NAMESPACE = "flowtt"
NO_POOLING = 2  # value of pooling_mode

_BAGS = (
    "Tensor indices, Tensor offsets, Tensor? per_sample_weights, int[] cores_per_table, "
    "int[] num_embeddings, int[] feature_table_map, int pooling_mode"
)

_PACKING = (
    "Tensor[] cores, int[] cores_per_table, int[] num_embeddings, ScalarType output_dtype, "
    "bool allow_tf32"
)

SCHEMAS: dict[str, str] = {
    "pack_tt_cores": f"({_PACKING}) -> Tensor",
    "repack_tt_cores": f"(Tensor(a!) packed, {_PACKING}) -> ()",
    "tt_embedding_bag": (
        f"(Tensor[] cores, {_BAGS}, ScalarType output_dtype, bool allow_tf32, "
        "bool deterministic) -> Tensor"
    ),
    "tt_embedding_bag_packed": (
        f"(Tensor[] cores, Tensor packed, {_BAGS}, ScalarType output_dtype, bool allow_tf32, "
        "bool deterministic) -> Tensor"
    ),
    "tt_embedding_bag_with_order": (
        f"(Tensor[] cores, {_BAGS}, ScalarType output_dtype, bool allow_tf32, "
        "bool deterministic) -> Tensor[]"
    ),
    "tt_embedding_bag_backward": (
        f"(Tensor grad_output, Tensor[] cores, {_BAGS}, bool allow_tf32=False, "
        "Tensor? order=None, bool deterministic=False) -> Tensor[]"
    ),
    "tt_embedding_bag_weights_grad": f"(Tensor grad_output, Tensor[] cores, {_BAGS}) -> Tensor",
    "tt_embedding_bag_backward_update": (
        "(Tensor grad_output, Tensor(a!)[] cores, Tensor(b!)[] momentum1, "
        f"Tensor(c!)[] momentum2, {_BAGS}, Tensor learning_rate, Tensor(d!) iter, str optimizer, "
        "float eps, float beta1, float beta2, float weight_decay, "
        "bool allow_tf32=False, Tensor? order=None, bool stochastic_rounding=False, "
        "bool deterministic=False) -> ()"
    ),
}


def define() -> None:
    """Defines the operators. Called once, when the package is imported."""
    for name, schema in SCHEMAS.items():
        torch.library.define(f"{NAMESPACE}::{name}", schema, tags=torch.Tag.pt2_compliant_tag)
