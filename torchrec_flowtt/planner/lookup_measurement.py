"""Measures the times that a calibration is made of."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchrec_flowtt.modules import OptimType, TableBatchedFlowTTEmbeddingBags
from torchrec_flowtt.planner.calibration import Bags, Grid, GridTimes, Ids, Precision
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


def lookup_us(
    spec: TTSpec, ids: Tensor, pooling_factor: int, precision: Precision
) -> tuple[float, float]:
    """Microseconds of the forward pass, and of the backward pass with the optimizer's step.

    Args:
        spec: the table.
        ids: of the batch, int64 ``[lookups]``; those beyond the last whole bag are left out.
        pooling_factor: lookups of each bag.
        precision: of the products.
    """
    device = ids.device
    bags = ids.numel() // pooling_factor
    ids = ids[: bags * pooling_factor]
    offsets = torch.arange(0, ids.numel() + 1, pooling_factor, device=device)
    module = TableBatchedFlowTTEmbeddingBags([spec], optimizer=OPTIMIZER, device=device)
    grad = torch.randn(bags, spec.embedding_dim, device=device).mul_(1e-3)

    def forward() -> Tensor:
        with torch.no_grad():
            result: Tensor = module(ids, offsets)
        return result

    def step() -> None:
        module(ids, offsets).backward(grad)

    with matmul_precision(precision):
        forward_ms = device_ms(forward, device)
        step_ms = device_ms(step, device)
    # A measurement's noise must not make a backward pass take no time.
    return forward_ms * 1e3, max(step_ms - forward_ms, 0.1 * step_ms) * 1e3


def measure_grids(
    plan: Plan, device: torch.device, advance: Callable[[], object] = lambda: None
) -> tuple[Grid, ...]:
    """Measures a plan.

    Args:
        plan: what to measure.
        device: where.
        advance: called after each measurement; there are ``plan.count()``.
    """
    lookups = Lookups(plan.num_embeddings, plan.zipf_exponent, device)
    bag_lengths: dict[Bags, int] = {"single": 1, "pooled": plan.pooling_factor}
    every_ids: tuple[Ids, ...] = ("uniform", "zipf")
    grids = []
    for num_cores, (ranks, dims, counts) in plan.grids.items():
        times = []
        kinds = itertools.product(plan.precisions, bag_lengths.items(), every_ids)
        for precision, (bags, length), ids in kinds:
            forward, backward = [], []
            for rank, dim, count in itertools.product(ranks, dims, counts):
                spec = TTSpec.suggest(plan.num_embeddings, dim, tt_ranks=rank, num_cores=num_cores)
                found = lookup_us(spec, lookups.draw(count, ids), length, precision)
                forward.append(round(found[0], 2))
                backward.append(round(found[1], 2))
                advance()
            shape = (len(ranks), len(dims), len(counts))
            for phase, us in (("forward", forward), ("backward", backward)):
                grid = torch.tensor(us, dtype=torch.float64).reshape(shape).tolist()
                times.append(
                    GridTimes.model_validate(
                        {
                            "precision": precision,
                            "bags": bags,
                            "ids": ids,
                            "phase": phase,
                            "us": grid,
                        }
                    )
                )
        grids.append(
            Grid(
                num_cores=num_cores,
                tt_ranks=ranks,
                embedding_dims=dims,
                lookups=counts,
                times=tuple(times),
            )
        )
    return tuple(grids)
