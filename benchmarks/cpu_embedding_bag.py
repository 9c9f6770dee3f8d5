"""Embedding bags on the CPU: TT kernels, a plain-torch TT chain, and an uncompressed table.

    python benchmarks/cpu_embedding_bag.py --output docs/performance/cpu_embedding_bag.json

Prints medians of the forward and of a whole training step (forward, backward, SGD) of

* ``flowtt``: TableBatchedFlowTTEmbeddingBags, SGD fused into the backward;
* ``unique + bmm``: the same TT table in plain torch: distinct rows by ``unique``, their chains by
  batched matrix products, pooling by ``embedding_bag``; autograd and ``torch.optim.SGD``;
* ``nn.EmbeddingBag``: an uncompressed table of the same N and D with sparse gradients and
  ``torch.optim.SGD``.

All of them get the same bags, of which several sets take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from environment import describe_run
from lookup_options import at_least
from tabulate import tabulate
from torch import Tensor, nn
from zipf_lookups import ZipfLookups, draw_zipf_lookups

from torchrec_flowtt.modules import TableBatchedFlowTTEmbeddingBags
from torchrec_flowtt.ops import cpu_kernel_level
from torchrec_flowtt.shapes import TTSpec

LEARNING_RATE = 0.01


@dataclasses.dataclass(frozen=True)
class Workload:
    """One table and its bags."""

    spec: TTSpec
    lookups: ZipfLookups
    index_sets: int


@dataclasses.dataclass(frozen=True)
class Percentiles:
    """Of the repetitions of one measurement."""

    p10: float
    p50: float
    p90: float


@dataclasses.dataclass(frozen=True)
class Result:
    """Times in milliseconds, and the bytes of the parameters."""

    name: str
    forward_ms: Percentiles
    training_ms: Percentiles
    parameter_bytes: int


class UniqueBmmEmbeddingBag(nn.Module):
    """A 3-core TT table in plain torch, sum pooling."""

    def __init__(self, spec: TTSpec, cores: list[Tensor]) -> None:
        """Copies the cores."""
        super().__init__()
        self.spec = spec
        self.cores = nn.ParameterList(nn.Parameter(core.clone()) for core in cores)

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """``[B, D]`` from indices ``[nnz]`` and offsets ``[B + 1]``."""
        _, p2, p3 = self.spec.p_shapes
        rows, row_of = indices.unique(return_inverse=True)
        n = rows.numel()
        first, second, third = self.cores
        slices1 = first.index_select(0, rows // (p2 * p3)).flatten(0, 1)
        slices2 = second.index_select(0, rows // p3 % p2).flatten(2, 3)
        slices3 = third.index_select(0, rows % p3).squeeze(-1)
        product = torch.bmm(slices1, slices2).view(n, -1, slices3.shape[1])
        values = torch.bmm(product, slices3).view(n, -1)
        return nn.functional.embedding_bag(
            row_of, values, offsets, mode="sum", include_last_offset=True
        )


def times_ms(run: Callable[[int], None], iterations: int, warmup: int) -> Percentiles:
    """Times of ``run(0), run(1), ..`` after some untimed calls."""
    for i in range(warmup):
        run(i)
    times = []
    for i in range(iterations):
        start = time.perf_counter()
        run(i)
        times.append((time.perf_counter() - start) * 1e3)
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return Percentiles(p10=deciles[0], p50=deciles[4], p90=deciles[8])


def measure(
    name: str,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    bags: list[tuple[Tensor, Tensor]],
    grad: Tensor,
    iterations: int,
) -> Result:
    """Times one implementation; ``optimizer`` None when the backward takes the step."""

    def forward(i: int) -> None:
        with torch.no_grad():
            module(*bags[i % len(bags)])

    def train(i: int) -> None:
        if optimizer is not None:
            optimizer.zero_grad()
        module(*bags[i % len(bags)]).backward(grad)
        if optimizer is not None:
            optimizer.step()

    warmup = max(2, len(bags))
    parameter_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    return Result(
        name,
        times_ms(forward, iterations, warmup),
        times_ms(train, iterations, warmup),
        parameter_bytes,
    )


def run(workload: Workload, iterations: int) -> tuple[list[Result], float]:
    """All implementations, and the largest relative difference of the two TT outputs."""
    spec = workload.spec
    bags = [draw_zipf_lookups(workload.lookups, seed) for seed in range(workload.index_sets)]
    grad = torch.randn(workload.lookups.batch_size, spec.embedding_dim)

    flowtt = TableBatchedFlowTTEmbeddingBags(
        [spec], optimizer="exact_sgd", learning_rate=LEARNING_RATE
    )
    plain = UniqueBmmEmbeddingBag(spec, [core.detach() for core in flowtt.tt_cores])
    with torch.no_grad():
        ours, theirs = flowtt(*bags[0]), plain(*bags[0])
    difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()

    results = [measure("flowtt", flowtt, None, bags, grad, 4 * iterations)]
    sgd = torch.optim.SGD(plain.parameters(), lr=LEARNING_RATE)
    results.append(measure("unique + bmm", plain, sgd, bags, grad, iterations))
    del flowtt, plain, sgd
    gc.collect()

    table = torch.empty(spec.num_embeddings, spec.embedding_dim).uniform_(-1e-3, 1e-3)
    dense = nn.EmbeddingBag.from_pretrained(
        table, freeze=False, mode="sum", sparse=True, include_last_offset=True
    )
    sgd = torch.optim.SGD(dense.parameters(), lr=LEARNING_RATE)
    results.append(measure("nn.EmbeddingBag", dense, sgd, bags, grad, iterations))
    return results, difference


def report(workload: Workload, results: list[Result], difference: float) -> dict[str, object]:
    """Everything needed to run it again, and the figures."""
    indices, _ = draw_zipf_lookups(workload.lookups)
    return {
        "benchmark": "cpu_embedding_bag",
        **describe_run(),
        "threads": torch.get_num_threads(),
        "cpu_kernel_level": cpu_kernel_level(),
        "table": {
            "num_embeddings": workload.spec.num_embeddings,
            "embedding_dim": workload.spec.embedding_dim,
            "p_shapes": workload.spec.p_shapes,
            "q_shapes": workload.spec.q_shapes,
            "tt_ranks": workload.spec.tt_ranks,
            "dtype": "float32",
        },
        "lookups": {
            **dataclasses.asdict(workload.lookups),
            "distinct_rows": indices.unique().numel(),
            "index_sets": workload.index_sets,
        },
        "largest_relative_difference_of_tt_outputs": difference,
        "results": [dataclasses.asdict(result) for result in results],
        "speedup_of_medians_over_unique_bmm": {
            "forward": results[1].forward_ms.p50 / results[0].forward_ms.p50,
            "training": results[1].training_ms.p50 / results[0].training_ms.p50,
        },
    }


def print_table(results: list[Result]) -> None:
    """Milliseconds, and how many times the first implementation is faster."""
    ours = results[0]
    rows = [
        [
            result.name,
            result.forward_ms.p50,
            f"{result.forward_ms.p50 / ours.forward_ms.p50:.1f} x",
            result.training_ms.p50,
            f"{result.training_ms.p50 / ours.training_ms.p50:.1f} x",
            f"{result.parameter_bytes / 2**20:.1f}",
        ]
        for result in results
    ]
    headers = ["", "forward ms", "", "training ms", "", "parameters MiB"]
    print(tabulate(rows, headers, floatfmt=".2f", disable_numparse=[2, 4]))


def parse_arguments() -> argparse.Namespace:
    """The defaults are the workload of the documentation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-embeddings", type=at_least(1), default=10_000_000)
    parser.add_argument("--p-shapes", type=int, nargs=3, default=(200, 220, 250))
    parser.add_argument("--q-shapes", type=int, nargs=3, default=(4, 4, 4))
    parser.add_argument("--tt-ranks", type=int, nargs=2, default=(16, 16))
    parser.add_argument("--batch-size", type=at_least(1), default=8192)
    parser.add_argument("--pooling-factor", type=at_least(1), default=20)
    parser.add_argument("--exponent", type=float, default=1.05, help="of the Zipf law")
    parser.add_argument("--index-sets", type=at_least(1), default=4, help="bags that take turns")
    parser.add_argument("--threads", type=at_least(1), default=2)
    parser.add_argument("--iterations", type=at_least(1), default=15)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark from the command line."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    p, q = tuple(arguments.p_shapes), tuple(arguments.q_shapes)
    spec = TTSpec(
        num_embeddings=arguments.num_embeddings,
        embedding_dim=q[0] * q[1] * q[2],
        p_shapes=p,
        q_shapes=q,
        tt_ranks=tuple(arguments.tt_ranks),
    )
    lookups = ZipfLookups(
        arguments.num_embeddings,
        arguments.batch_size,
        arguments.pooling_factor,
        arguments.exponent,
    )
    workload = Workload(spec, lookups, arguments.index_sets)
    results, difference = run(workload, arguments.iterations)
    print_table(results)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report(workload, results, difference), indent=2)
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
