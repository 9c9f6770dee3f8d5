"""Gradients of the tiled backward kernels on CUDA against float64, at sizes that fill the card."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.gpu.calls import MEAN, NONE, SUM, Call, Table, make_call
from tests.gpu.expected import expect, relative_error

pytestmark = pytest.mark.usefixtures("tiled_path")

TABLES = {
    "exact": Table((200, 220, 250), (4, 4, 8), (32, 32), 10_000_000),
    "rank 16": Table((200, 220, 250), (4, 4, 4), (16, 16)),
    "even": Table((60, 70, 80), (3, 4, 6), (24, 18)),
    "any": Table((60, 70, 80), (3, 2, 7), (17, 29)),
    "many rows": Table((4000, 1500, 2000), (4, 2, 4), (8, 12)),
    "few slices": Table((2, 3, 40_000), (4, 4, 8), (32, 32)),
}
# In blocks, see docs/kernels.md.
BLOCKS = {
    "whole blocks": Table((60, 70, 80), (8, 4, 8), (64, 96)),
    "rank 128": Table((60, 70, 80), (4, 4, 4), (128, 128)),
    "blocks": Table((40, 50, 60), (5, 6, 12), (50, 37)),
    "two cores": Table((3162, 3163), (8, 16), (32,), 10_000_000),
    "two cores, odd": Table((900, 1100), (7, 9), (45,)),
    "four cores": Table((56, 56, 56, 57), (4, 2, 4, 4), (32, 32, 32), 10_000_000),
    "four cores, odd": Table((20, 21, 22, 23), (3, 5, 3, 2), (17, 20, 9)),
}
THREE_PRODUCTS = 1e-5
ONE_PRODUCT = 1e-3


def gradients(call: Call, grad: Tensor, allow_tf32: bool) -> list[Tensor]:
    found: Sequence[Tensor] = torch.ops.flowtt.tt_embedding_bag_backward(
        grad, *call.operands(), allow_tf32
    )
    return list(found)


def assert_near(call: Call, grad: Tensor, allow_tf32: bool = False) -> None:
    """As a whole, and that slices which are not looked up have no gradient."""
    right = expect(call)
    tolerance = ONE_PRODUCT if allow_tf32 else THREE_PRODUCTS
    tolerance += {torch.float16: 1e-3, torch.bfloat16: 6e-3}.get(call.cores[0].dtype, 0.0)
    found = gradients(call, grad, allow_tf32)
    for actual, expected in zip(found, right.gradients(grad)[0], strict=True):
        assert relative_error(actual, expected) <= tolerance
        untouched = (expected == 0).flatten(1).all(1)
        assert (actual.cpu()[untouched] == 0).all()


@pytest.mark.parametrize("allow_tf32", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str, allow_tf32: bool) -> None:
    call = make_call([TABLES[name]], batch_size=20_000, max_length=3, device="cuda")
    assert_near(call, call.grad_output(), allow_tf32)


@pytest.mark.parametrize("allow_tf32", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name: str, allow_tf32: bool) -> None:
    call = make_call([BLOCKS[name]], batch_size=1_500, max_length=3, weighted=True, device="cuda")
    assert_near(call, call.grad_output(), allow_tf32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["exact", "any", "whole blocks", "two cores", "four cores"])
def test_16_bit_cores(name: str, dtype: torch.dtype) -> None:
    table, batch_size = (TABLES[name], 5_000) if name in TABLES else (BLOCKS[name], 1_000)
    call = make_call([table], batch_size=batch_size, dtype=dtype, weighted=True, device="cuda")
    assert_near(call, call.grad_output(), allow_tf32=True)


@pytest.mark.parametrize("mode", [SUM, MEAN, NONE])
def test_pooling(mode: int) -> None:
    call = make_call(
        [TABLES["exact"]],
        batch_size=3_000,
        max_length=20,
        weighted=mode != NONE,
        pooling_mode=mode,
        device="cuda",
    )
    assert_near(call, call.grad_output())


@pytest.mark.parametrize("allow_tf32", [False, True])
def test_skew(allow_tf32: bool) -> None:
    """30% of the lookups in one prefix, 10% of one id, 10% with one i3."""
    table = TABLES["exact"]
    generator = torch.Generator().manual_seed(3)
    count = 60_000
    ids = torch.randint(0, table.rows, (count,), generator=generator)
    kind = torch.rand(count, generator=generator)
    ids = torch.where(kind < 0.3, ids % 250 + 250 * 1_234, ids)
    ids = torch.where((kind >= 0.3) & (kind < 0.4), torch.tensor(7_654_321), ids)
    ids = torch.where((kind >= 0.4) & (kind < 0.5), ids - ids % 250 + 17, ids)
    call = make_call([table], batch_size=count, lengths=[1] * count, ids=ids.tolist())
    assert_near(call.to("cuda"), call.grad_output().cuda(), allow_tf32)


def test_features_that_share_tables() -> None:
    call = make_call(
        [TABLES["exact"], TABLES["any"], TABLES["rank 16"]],
        feature_table_map=[0, 1, 0, 2, 1, 2],
        batch_size=2_000,
        max_length=5,
        pooling_mode=MEAN,
        device="cuda",
    )
    assert_near(call, call.grad_output())


def test_two_ranges() -> None:
    """More lookups than are sorted at once."""
    table = TABLES["rank 16"]
    call = make_call([table], batch_size=1, lengths=[1_200_000], device="cuda")
    assert_near(call, call.grad_output())


@pytest.mark.parametrize("name", ["exact", "whole blocks", "two cores", "four cores"])
def test_captured_graph_with_other_indices(name: str) -> None:
    table, bags = (TABLES[name], 9_000) if name in TABLES else (BLOCKS[name], 1_000)
    calls = [
        make_call([table], batch_size=bags, lengths=[2] * bags, seed=seed, device="cuda")
        for seed in (1, 2)
    ]
    first, second = calls
    second.cores = first.cores
    grad = first.grad_output()
    gradients(first, grad, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(first, grad, False)
    first.indices.copy_(second.indices)
    graph.replay()
    right = expect(second).gradients(grad)[0]
    for actual, expected in zip(found, right, strict=True):
        assert relative_error(actual, expected) <= THREE_PRODUCTS
