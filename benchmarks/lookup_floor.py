"""The least time that a TT lookup can take on a card: what it must move and compute.

No kernel is faster than the largest of three terms: writing the output to device memory, the
multiplications of the chain (in the best order, each distinct part once, as they occur in the
batches that are measured), and reading every core slice that occurs from L2 once. Indices are left
out; so is grouping, which reads them.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from lookup_workloads import Distinct, Workload

from torchrec_flowtt.shapes import TTSpec


@dataclasses.dataclass(frozen=True)
class Rates:
    """Of one card, measured by micro-benchmarks: large buffers, random data.

    Attributes:
        write: device memory, written only, bytes/s.
        copy: device memory, read + written, bytes/s.
        l2_read: random slices from L2, bytes/s by the least size of a slice in bytes.
        l2_bytes: size of the L2 cache.
        mma: warp-level `mma.sync` with register operands, FLOP/s by precision. One product of fp16
            operands has the accuracy of tf32, three of their parts that of fp32.
    """

    write: float
    copy: float
    l2_bytes: int
    l2_read: dict[int, float]
    mma: dict[str, float]


RATES = {
    "NVIDIA H200": Rates(
        write=4.4e12,
        copy=3.96e12,
        l2_bytes=60 * 2**20,
        l2_read={16_384: 9e12, 8192: 8.8e12, 2048: 5.7e12, 0: 3.4e12},
        mma={"fp32": 637e12 / 3, "tf32": 637e12, "fp16": 637e12, "bf16": 637e12},
    )
}


@dataclasses.dataclass(frozen=True)
class Floor:
    """Microseconds.

    Attributes:
        forward_us: least time of a forward.
        training_us: least time of a forward and then a backward with SGD; with other optimizers it
            is longer, by what their state takes.
        bound: the term that is the largest of a forward's: "memory", "mma" or "l2".
        memory_us: writing the output, and reading what of the slices that occur exceeds L2.
        mma_us: the forward's products.
        l2_us: one read of each slice that occurs.
        slice_traffic_us: a read of the slices anew for each prefix and row; no bound, as slices
            can stay in registers and shared memory, but what a kernel that keeps none would take.
    """

    forward_us: float
    training_us: float
    bound: str
    memory_us: float
    mma_us: float
    l2_us: float
    slice_traffic_us: float


def chain_flops(spec: TTSpec, distinct: Distinct) -> tuple[float, float]:
    """FLOP of all the chain's products and of the last one of them.

    The cheapest order of the products: the product of cores a .. b is formed once for each distinct
    run of digits a .. b that occurs, from those of a .. m and of m + 1 .. b, whatever m is best.
    """
    shapes = spec.core_shapes

    @functools.cache
    def cheapest(a: int, b: int) -> tuple[float, float]:
        if a == b:
            return 0.0, 0.0
        columns = math.prod(q for _, _, q, _ in shapes[a : b + 1])
        found = []
        for m in range(a, b):
            size = shapes[a][1] * columns * shapes[m][3] * shapes[b][3]
            product = 2.0 * distinct.spans[a, b] * size
            found.append((cheapest(a, m)[0] + cheapest(m + 1, b)[0] + product, product))
        return min(found)

    return cheapest(0, len(shapes) - 1)


def slice_bytes(spec: TTSpec, element_size: int) -> list[int]:
    """Bytes of a slice of each core."""
    return [math.prod(shape[1:]) * element_size for shape in spec.core_shapes]


def l2_rate(rates: Rates, size: int) -> float:
    """Bytes/s at which slices of `size` bytes come from L2."""
    return rates.l2_read[max(least for least in rates.l2_read if least <= size)]


def lookup_floor(
    workload: Workload, distinct: Distinct, precision: str, element_size: int, rates: Rates
) -> Floor:
    """The floor of one workload.

    In the backward each product but the last is computed anew (intermediates are not stored), and
    each has two products of the same size, the gradients of its operands. The output's
    gradient is read once, and each slice and its gradient once.

    Args:
        workload: tables and batch.
        distinct: counts of its batches.
        precision: key of `rates.mma`.
        element_size: bytes of an element of the cores.
        rates: of the card.
    """
    spec = workload.spec
    output_bytes = math.prod(workload.output_shape) * workload.output_torch_dtype.itemsize
    flops, last_flops = chain_flops(spec, distinct)
    sizes = slice_bytes(spec, element_size)
    touched = sum(n * size for n, size in zip(distinct.slices, sizes, strict=True))
    beyond_l2 = max(0.0, touched - rates.l2_bytes)
    terms = {
        "memory": (output_bytes + beyond_l2) / rates.write * 1e6,
        "mma": flops / rates.mma[precision] * 1e6,
        "l2": touched / max(rates.l2_read.values()) * 1e6,
    }
    bound = max(terms, key=terms.__getitem__)
    forward_us = terms[bound]
    backward_flops = 3 * flops - last_flops
    backward_us = max(
        output_bytes / rates.copy * 1e6,
        backward_flops / rates.mma[precision] * 1e6,
        2 * terms["l2"],
    )
    anew = sum(
        n * size / l2_rate(rates, size) for n, size in zip(distinct.prefixes, sizes, strict=True)
    )
    return Floor(
        forward_us=forward_us,
        training_us=forward_us + backward_us,
        bound=bound,
        memory_us=terms["memory"],
        mma_us=terms["mma"],
        l2_us=terms["l2"],
        slice_traffic_us=anew * 1e6,
    )
