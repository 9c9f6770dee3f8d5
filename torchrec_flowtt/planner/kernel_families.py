"""Which kernels look a table up, and what a lookup costs them.

Tables whose lookups take the same kernels cost alike: so much for each lookup, each column and each
multiplication, paddings included. What is padded, and which tables a family takes, is told in
docs/kernels.md.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from torchrec_flowtt.shapes import TTSpec

_MAX_FACTOR = 65_536  # rows of a core, and pairs of the last two of four
_MAX_RANK = 128
_MAX_PAIR_ELEMENTS = 2_048
_MAX_PAIR_SLICE_BYTES = 64 * 1024
_MAX_PAIR_HALVES = 4 * 2**20


Family = Literal["tiled", "wide", "tiled_pairs", "wide_pairs", "two_core", "general", "cpu"]


class LookupWork(NamedTuple):
    """What the kernels do for a lookup.

    Attributes:
        family: ``"tiled"``, ``"wide"`` (three cores), ``"tiled_pairs"``, ``"wide_pairs"`` (four
            cores, the last two contracted before), ``"two_core"``, ``"general"``; on the CPU
            ``"cpu"``.
        columns: of a row.
        flops: of the products of one row, with paddings.
    """

    family: Family
    columns: int
    flops: int


def lookup_work(spec: TTSpec, device: str) -> LookupWork:
    """What a lookup in a table costs the kernels of a device type."""
    if device != "cuda":
        return LookupWork("cpu", spec.embedding_dim, spec.flops_per_lookup)
    work = _two_cores(spec) if spec.num_cores == 2 else _three_cores(spec)
    return work or LookupWork("general", spec.embedding_dim, spec.flops_per_lookup)


def _two_cores(spec: TTSpec) -> LookupWork | None:
    (q1, q2), (rank,) = spec.q_shapes, spec.tt_ranks
    if q1 > 64 or q2 > 32 or rank > _MAX_RANK or max(spec.p_shapes) > _MAX_FACTOR:
        return None
    padded = next(r for r in (32, 64, 128) if rank <= r)
    return LookupWork("two_core", spec.embedding_dim, 2 * spec.embedding_dim * padded)


def _three_cores(spec: TTSpec) -> LookupWork | None:
    pairs = False
    p, q, ranks = spec.p_shapes, spec.q_shapes, spec.tt_ranks
    if spec.num_cores == 4:
        if not _contracts_pairs(spec):
            return None
        p, q, ranks = (*p[:2], p[2] * p[3]), (*q[:2], q[2] * q[3]), ranks[:2]
        pairs = True
    rank = max(ranks)
    if max(p) > _MAX_FACTOR:
        return None
    if rank <= 32 and q[0] <= 4 and q[1] <= 4 and q[2] <= 8:
        padded = 16 if rank <= 16 else 32
        columns = 4 if q[2] <= 4 else 8
        flops = 2 * 16 * padded * (padded + columns)
        return LookupWork("tiled_pairs" if pairs else "tiled", spec.embedding_dim, flops)
    if rank <= _MAX_RANK and q[0] <= 8 and q[1] <= 8 and q[2] <= 16:
        padded = math.ceil(rank / 32) * 32
        columns = max(2, _next_power_of_two(q[2]))
        flops = 2 * _next_power_of_two(q[0]) * q[1] * padded * (padded + columns)
        return LookupWork("wide_pairs" if pairs else "wide", spec.embedding_dim, flops)
    return None


def _contracts_pairs(spec: TTSpec) -> bool:
    p3, p4 = spec.p_shapes[2:]
    q3, q4 = spec.q_shapes[2:]
    rank2, rank3 = spec.tt_ranks[1:]
    if p3 * p4 > _MAX_FACTOR or q4 > 8 or q3 * q4 > 16:
        return False
    if rank2 * q3 * _next_power_of_two(q4) > _MAX_PAIR_ELEMENTS:
        return False
    if (rank2 * q3 + 1) * rank3 * 4 > _MAX_PAIR_SLICE_BYTES:
        return False
    padded = math.ceil(max(spec.tt_ranks[:2]) / 32) * 32
    return p3 * p4 * padded * max(2, _next_power_of_two(q3 * q4)) <= _MAX_PAIR_HALVES


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
