"""Modules of this package as exported programs, on any device; torch alone is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tests import reference
from tests.tolerances import assert_close
from torchrec_flowtt.modules import FlowTTEmbeddingBag, TableBatchedFlowTTEmbeddingBags
from torchrec_flowtt.shapes import TTSpec

ROOT = Path(__file__).resolve().parents[1]
# Batch size and longest bag; 1 and empty batches are what a compiler would specialise on.
SIZES = [(5, 4), (1, 4), (33, 3), (2, 0), (1, 0)]
# A general CUDA kernel adds up its float32 products one after the other.
SLACK = {"cpu": 2.0, "cuda": 10.0}
_ADS = TTSpec(60, 12, (4, 3, 5), (2, 3, 2), (4, 3), name="ads")
_USERS = TTSpec(300, 8, (17, 18), (2, 4), (3,), name="users")
_FEATURES = [0, 1, 0]

# A process that serves a package: no more is imported than the second line says.
SERVE = """
import sys
import torch, torchrec_flowtt.ops
package, requests, answers = sys.argv[1:]
serve = torch._inductor.aoti_load_package(package)
torch.save([serve(*request) for request in torch.load(requests)], answers)
assert not {"torchrec", "fbgemm_gpu"} & set(sys.modules)
"""


class Lookups(nn.Module):
    """A weighted group of tables, and one table by itself, side by side."""

    def __init__(self, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.group = TableBatchedFlowTTEmbeddingBags(
            [_ADS, _USERS],
            feature_table_map=_FEATURES,
            optimizer="none",
            weights_precision=dtype,
            init_variances=[1.0, 1.0],
        ).to(device)
        self.bag = FlowTTEmbeddingBag(
            _USERS, mode="mean", dtype=dtype, output_dtype=torch.float32, init_variance=1.0
        ).to(device)

    def forward(
        self, indices: Tensor, lengths: Tensor, weights: Tensor, ids: Tensor, starts: Tensor
    ) -> Tensor:
        """``[B, 40]``: three features of the group, of `lengths` ``[3, B]``, and one of the table.

        Offsets of ``3 * B + 1`` elements would leave it to the compiler to find B.
        """
        offsets = torch.cat([lengths.new_zeros(1), lengths.reshape(-1).cumsum(0)])
        return torch.cat([self.group(indices, offsets, weights), self.bag(ids, starts)], dim=1)

    def expected(self, *inputs: Tensor) -> Tensor:
        """The same in float64 from the dense tables, on the CPU."""
        indices, lengths, weights, ids, starts = (tensor.cpu() for tensor in inputs)
        offsets = torch.cat([lengths.new_zeros(1), lengths.reshape(-1).cumsum(0)])
        of_group = reference.Bags(
            indices, offsets, weights, [3, 2], [60, 300], _FEATURES, reference.SUM
        )
        closed = torch.cat([starts, torch.tensor([ids.numel()])])
        of_bag = reference.Bags(ids, closed, None, [2], [300], [0], reference.MEAN)
        group_cores = [core.detach().cpu() for core in self.group.tt_cores]
        bag_cores = [core.detach().cpu() for core in self.bag.tt_cores]
        return torch.cat(
            [
                reference.embedding_bag(group_cores, of_group),
                reference.embedding_bag(bag_cores, of_bag),
            ],
            dim=1,
        )


def lookup_inputs(size: int, longest: int, device: torch.device | str) -> tuple[Tensor, ...]:
    """Arguments of :class:`Lookups` for a batch of `size`."""
    generator = torch.Generator().manual_seed(100 * size + longest)

    def bags(count: int) -> tuple[Tensor, Tensor]:
        lengths = torch.randint(0, longest + 1, (count,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return torch.randint(0, 60, (int(offsets[-1]),), generator=generator), offsets

    indices, offsets = bags(3 * size)
    weights = torch.rand(indices.numel(), generator=generator) + 0.5
    ids, starts = bags(size)
    lengths = offsets.diff().reshape(3, size)
    inputs = (indices, lengths, weights, ids, starts[:-1].contiguous())
    return tuple(tensor.to(device) for tensor in inputs)


def export_lookups(module: Lookups, device: torch.device | str, strict: bool) -> ExportedProgram:
    """The module for any batch size and number of lookups."""
    size = Dim("size", min=1, max=1 << 20)
    lookups, ids = Dim("lookups", min=0, max=1 << 24), Dim("ids", min=0, max=1 << 24)
    dynamic_shapes = ({0: lookups}, {1: size}, {0: lookups}, {0: ids}, {0: size})
    with torch.no_grad():
        return torch.export.export(
            module, lookup_inputs(5, 4, device), dynamic_shapes=dynamic_shapes, strict=strict
        )


def check_lookups(
    program: Callable[..., Tensor], module: Lookups, device: torch.device | str
) -> None:
    """Runs the program on batches of all sizes, beside eager execution and the reference."""
    for size, longest in SIZES:
        inputs = lookup_inputs(size, longest, device)
        with torch.no_grad():
            output, eager = program(*inputs), module(*inputs)
        assert output.device == eager.device and output.dtype == eager.dtype
        torch.testing.assert_close(output, eager, rtol=1e-5, atol=1e-5)
        what = f"batch of {size}, bags up to {longest}"
        slack = SLACK[output.device.type]
        assert_close(output.detach().cpu(), module.expected(*inputs), what, slack)


def serve_in_fresh_process(
    package: Path, requests: Sequence[tuple[Tensor, ...]], folder: Path
) -> list[Any]:
    """The answers of a process that did not make the package."""
    torch.save(list(requests), folder / "requests.pt")
    result = subprocess.run(
        [
            *(sys.executable, "-c", SERVE),
            *(str(package), str(folder / "requests.pt"), str(folder / "answers.pt")),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return torch.load(folder / "answers.pt")
