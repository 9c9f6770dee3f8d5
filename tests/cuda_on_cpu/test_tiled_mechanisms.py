"""The tiled kernels with mechanisms switched off, without a choice of order, on other devices."""

from __future__ import annotations

import pytest
import torch

from tests.cuda_on_cpu.emulated import Device, Order, forward
from tests.cuda_on_cpu.tiled_tables import (
    ONE_PRODUCT,
    SOME,
    TABLES,
    THREE_PRODUCTS,
    assert_near,
)
from tests.gpu.calls import Table, make_call
from tests.gpu.expected import expect

MECHANISMS = ["fusion", "grouping", "folding", "sharing", "stealing", "checkpoints"]


@pytest.fixture(autouse=True)
def _tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", "tiled")


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("mechanism", [*MECHANISMS, ",".join(MECHANISMS)])
def test_disabled_mechanisms(name: str, mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWTT_CUDA_DISABLE", mechanism)
    # Half of the lookups share a prefix: there are checkpoints, and windows to steal.
    table = TABLES[name]
    last = table.p[-1]
    ids = torch.randint(0, table.rows, (300,), generator=torch.Generator().manual_seed(3))
    ids[::2] = table.rows // 2 // last * last + ids[::2] % last
    call = make_call([table], batch_size=150, lengths=[1, 3] * 75, ids=ids.tolist())
    expected = expect(call).output
    for allow_tf32, tolerance in ((False, THREE_PRODUCTS), (True, ONE_PRODUCT)):
        device = Device(order=Order.RANDOM, seed=len(mechanism))
        assert_near(forward(call, device, allow_tf32=allow_tf32), expected, tolerance)


@pytest.mark.parametrize("name", ["32x8", "wide 32", "wide 64", "wide 128", "4 cores"])
@pytest.mark.parametrize("seed", [2, 5, 6])
def test_checkpoints_that_other_blocks_find(name: str, seed: int) -> None:
    """A few heavy prefixes, and blocks that get far ahead of each other."""
    generator = torch.Generator().manual_seed(seed)
    table = TABLES[name]
    last = table.p[-1] if len(table.p) == 3 else table.p[-2] * table.p[-1]
    heavy = torch.randint(0, table.rows // last, (8,), generator=generator)
    of_each = torch.randint(120, 600, (8,), generator=generator)
    prefixes = heavy.repeat_interleave(of_each)[: 6 * 300]
    ids = prefixes * last + torch.randint(0, last, prefixes.shape, generator=generator)
    call = make_call([table], batch_size=600, lengths=[1, 5] * 300, ids=ids.tolist())
    device = Device(6, order=Order.BURSTS, seed=seed)
    assert_near(forward(call, device), expect(call).output, THREE_PRODUCTS)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_results_do_not_depend_on_the_order(name: str, dtype: torch.dtype) -> None:
    call = make_call([TABLES[name], TABLES["16x4"]], batch_size=40, max_length=7, weighted=True)
    devices = [Device(order=Order.RANDOM, seed=seed) for seed in (1, 2, 3)]
    devices += [Device(order=order) for order in (Order.ASCENDING, Order.DESCENDING)]
    outputs = [forward(call, device, dtype, deterministic=True) for device in devices]
    assert_near(outputs[0], expect(call).output, THREE_PRODUCTS if dtype.itemsize == 4 else 4e-3)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("allow_tf32", [False, True])
def test_bags_do_not_depend_on_their_neighbours(allow_tf32: bool) -> None:
    table = TABLES["16x4"]
    ids = torch.randint(0, table.rows, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    outputs = []
    for length in (0, 1, 30, 90, 600):
        lengths = [20, length, 20]
        around = ids[:20] + ids[:1] * length + ids[20:]
        call = make_call([table], batch_size=3, lengths=lengths, ids=around)
        outputs.append(forward(call, allow_tf32=allow_tf32, deterministic=True)[::2])
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("multiprocessors", [1, 8, 40])
@pytest.mark.parametrize("order", [Order.DESCENDING, Order.RANDOM], ids=["descending", "random"])
def test_chunk_sizes(multiprocessors: int, order: Order) -> None:
    """Chunks of four, two and one lookups a thread, by the number of multiprocessors."""
    table = Table((20, 22, 25), (4, 4, 4), (3, 2), 10_007)
    call = make_call([table], batch_size=3000, max_length=6, weighted=True)
    device = Device(multiprocessors, order=order)
    assert_near(forward(call, device, allow_tf32=True), expect(call).output, ONE_PRODUCT)


@pytest.mark.parametrize("name", SOME)
def test_device_without_dependent_launches(name: str) -> None:
    call = make_call([TABLES[name]], batch_size=200)
    device = Device(1, capability_major=8)
    assert_near(forward(call, device), expect(call).output, THREE_PRODUCTS)
