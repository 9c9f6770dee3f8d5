"""Measures the times that a calibration is made of."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_flowtt.modules import OptimType, TableBatchedFlowTTEmbeddingBags
from torchrec_flowtt.planner.calibration import Ids, Measurement, Precision
from torchrec_flowtt.shapes import TTSpec

OPTIMIZER = OptimType.EXACT_ROWWISE_ADAGRAD
_MILLISECONDS_OF_A_GRAPH = 1
_SECONDS_OF_A_CPU_TIMING = 0.05
_MULTIPLIER = 0x9E3779B1  # prime, so that multiplying by it permutes the rows of any table


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        num_embeddings: rows of every table.
        pooling_factor: lookups of a pooled bag.
        zipf_exponent: of skewed ids.
        precisions: of the products.
        grids: by number of cores: ranks, columns and lookups.
    """

    num_embeddings: int
    pooling_factor: int
    zipf_exponent: float
    precisions: tuple[Precision, ...]
    grids: dict[int, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]

    def count(self) -> int:
        """How many tables and kinds of lookups there are."""
        shapes = sum(len(r) * len(d) * len(n) for r, d, n in self.grids.values())
        return shapes * len(self.precisions) * 4


CUDA_PLAN = Plan(
    num_embeddings=10_000_000,
    pooling_factor=20,
    zipf_exponent=1.05,
    precisions=("fp32", "tf32"),
    grids={
        2: ((16, 32, 64, 128), (32, 128), (1_024, 16_384, 131_072, 1_048_576)),
        3: ((8, 16, 32, 64, 128), (16, 32, 64, 128, 256), (1_024, 16_384, 131_072, 1_048_576)),
        4: ((16, 32, 64), (32, 128), (1_024, 16_384, 131_072, 1_048_576)),
    },
)
CPU_PLAN = Plan(
    num_embeddings=10_000_000,
    pooling_factor=20,
    zipf_exponent=1.05,
    precisions=("fp32",),
    grids={
        2: ((16, 64), (32, 128), (1_024, 32_768)),
        3: ((8, 32, 128), (16, 64, 256), (1_024, 32_768)),
        4: ((16, 64), (32, 128), (1_024, 32_768)),
    },
)


class Lookups:
    """Batches of ids, each drawn once.

    Args:
        num_embeddings: rows N.
        zipf_exponent: of skewed ids; popular rows are spread over the table.
        device: of the ids.
    """

    def __init__(self, num_embeddings: int, zipf_exponent: float, device: torch.device) -> None:
        """Nothing is drawn yet."""
        self._rows = num_embeddings
        self._exponent = zipf_exponent
        self._generator = torch.Generator(device).manual_seed(0)
        self._cumulative: Tensor | None = None
        self._drawn: dict[tuple[int, Ids], Tensor] = {}

    def draw(self, count: int, ids: Ids) -> Tensor:
        """Ids, int64 ``[count]``."""
        if (count, ids) not in self._drawn:
            self._drawn[count, ids] = self._draw(count, ids)
        return self._drawn[count, ids]

    def _draw(self, count: int, ids: Ids) -> Tensor:
        device = self._generator.device
        if ids == "uniform":
            return torch.randint(self._rows, (count,), generator=self._generator, device=device)
        if self._cumulative is None:
            ranks = torch.arange(1, self._rows + 1, dtype=torch.float64, device=device)
            self._cumulative = ranks.pow_(-self._exponent).cumsum_(0)
        draws = torch.rand(count, generator=self._generator, dtype=torch.float64, device=device)
        ranks = torch.searchsorted(self._cumulative, draws * self._cumulative[-1])
        return ranks.clamp_(max=self._rows - 1) * _MULTIPLIER % self._rows


def device_ms(call: Callable[[], object], device: torch.device) -> float:
    """Median milliseconds of a call: on CUDA in a graph, so that the host plays no part."""
    if device.type == "cuda":
        from triton.testing import do_bench_cudagraph  # part of torch's CUDA builds

        with torch.cuda.device(device):
            return float(do_bench_cudagraph(call, _MILLISECONDS_OF_A_GRAPH, return_mode="median"))
    from torch.utils.benchmark import Timer

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=_SECONDS_OF_A_CPU_TIMING).median * 1e3


@contextlib.contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """TF32 allowed or not, as long as it lasts."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before


def measure_lookup(
    spec: TTSpec, lookups: Lookups, count: int, ids: Ids, pooling_factor: int, precision: Precision
) -> Measurement:
    """Times of a call.

    Args:
        spec: the table.
        lookups: where its ids come from.
        count: lookups; those beyond the last whole bag are left out.
        ids: how they are distributed.
        pooling_factor: lookups of each bag.
        precision: of the products.
    """
    bags = count // pooling_factor
    indices = lookups.draw(count, ids)[: bags * pooling_factor]
    device = indices.device
    offsets = torch.arange(0, indices.numel() + 1, pooling_factor, device=device)
    module = TableBatchedFlowTTEmbeddingBags([spec], optimizer=OPTIMIZER, device=device)
    grad = torch.randn(bags, spec.embedding_dim, device=device).mul_(1e-3)

    def forward() -> Tensor:
        with torch.no_grad():
            result: Tensor = module(indices, offsets)
        return result

    def step() -> None:
        module(indices, offsets).backward(grad)

    with matmul_precision(precision):
        forward_ms = device_ms(forward, device)
        step_ms = device_ms(step, device)
    # A measurement's noise must not make a backward pass take no time.
    backward_ms = max(step_ms - forward_ms, 0.1 * step_ms)
    return Measurement(
        num_embeddings=spec.num_embeddings,
        embedding_dim=spec.embedding_dim,
        p_shapes=spec.p_shapes,
        q_shapes=spec.q_shapes,
        tt_ranks=spec.tt_ranks,
        lookups=indices.numel(),
        pooling_factor=pooling_factor,
        ids=ids,
        precision=precision,
        forward_us=round(forward_ms * 1e3, 2),
        backward_us=round(backward_ms * 1e3, 2),
    )


def measure_plan(
    plan: Plan, device: torch.device, advance: Callable[[], object] = lambda: None
) -> list[Measurement]:
    """Measures a plan.

    Args:
        plan: what to measure.
        device: where.
        advance: called after each measurement; there are ``plan.count()``.
    """
    lookups = Lookups(plan.num_embeddings, plan.zipf_exponent, device)
    bag_lengths = (1, plan.pooling_factor)
    every_ids: tuple[Ids, ...] = ("uniform", "zipf")
    found = []
    for num_cores, axes in plan.grids.items():
        for rank, dim, count in itertools.product(*axes):
            spec = TTSpec.suggest(plan.num_embeddings, dim, tt_ranks=rank, num_cores=num_cores)
            for kind in itertools.product(every_ids, bag_lengths, plan.precisions):
                found.append(measure_lookup(spec, lookups, count, *kind))
                advance()
    return found
