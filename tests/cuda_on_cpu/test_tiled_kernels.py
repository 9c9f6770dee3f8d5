"""The tiled, wide and two-core kernels from the ids to the pooled rows, against float64."""

from __future__ import annotations

import pytest
import torch

from tests.cuda_on_cpu.emulated import Device, Order, forward
from tests.gpu.calls import MEAN, NONE, SUM, Table, make_call
from tests.gpu.expected import expect

# One for each kernel, and sizes that no tile divides.
TABLES = {
    "16x4": Table((20, 22, 25), (4, 4, 4), (16, 16), 10_007),
    "16x8": Table((7, 11, 13), (4, 4, 8), (16, 16)),
    "32x4": Table((5, 3, 40), (4, 4, 4), (32, 32)),
    "32x8": Table((20, 22, 25), (4, 4, 8), (32, 32), 10_999),
    "padded": Table((6, 5, 4), (3, 2, 7), (5, 30)),
    "one row": Table((1, 1, 1), (4, 4, 8), (32, 32)),
    "wide 32": Table((9, 10, 11), (3, 5, 7), (19, 24)),
    "wide 64": Table((20, 22, 25), (4, 4, 8), (64, 50)),
    "wide 96": Table((9, 10, 11), (4, 4, 8), (96, 70)),
    "wide 128": Table((9, 10, 11), (2, 4, 4), (128, 100)),
    "wide, 512 columns": Table((5, 6, 7), (8, 8, 8), (33, 33)),
    "2 cores, rank 32": Table((90, 110), (8, 16), (32,), 9_889),
    "2 cores, rank 64": Table((9, 30), (16, 32), (50,)),
    "2 cores, rank 128": Table((9, 130), (5, 19), (70,)),
    "4 cores": Table((10, 12, 9, 11), (4, 4, 4, 2), (32, 32, 32), 11_001),
    "4 cores, odd": Table((6, 5, 4, 3), (3, 5, 3, 5), (17, 40, 9)),
    "4 cores, ranks 64": Table((5, 6, 7, 8), (4, 4, 2, 8), (64, 64, 64)),
    "4 cores, one column": Table((3, 4, 5, 6), (1, 1, 1, 1), (2, 3, 4)),
}
SOME = ["32x8", "padded", "wide 64", "2 cores, rank 32", "4 cores"]
MECHANISMS = ["fusion", "grouping", "folding", "sharing", "stealing", "checkpoints"]
ORDERS = list(Order)
THREE_PRODUCTS = 2e-6
ONE_PRODUCT = 1.2e-3


@pytest.fixture(autouse=True)
def _tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", "tiled")


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """By the norm of the difference, so that one wrong row of thousands is found."""
    assert actual.shape == expected.shape and actual.isfinite().all()
    rows = (actual.double() - expected).norm(dim=1)
    scale = expected.norm() / max(expected.shape[0], 1) ** 0.5
    assert (rows <= 8 * tolerance * scale).all(), f"row {int(rows.argmax())}: {rows.max() / scale}"
    assert rows.norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name.lower())
@pytest.mark.parametrize("allow_tf32", [False, True], ids=["three products", "one product"])
def test_values(name: str, order: Order, allow_tf32: bool) -> None:
    call = make_call([TABLES[name]], batch_size=60, max_length=6, weighted=True, pooling_mode=MEAN)
    output = forward(call, Device(order=order), allow_tf32=allow_tf32)
    assert_near(output, expect(call).output, ONE_PRODUCT if allow_tf32 else THREE_PRODUCTS)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("mechanism", [*MECHANISMS, ",".join(MECHANISMS)])
def test_disabled_mechanisms(name: str, mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWTT_CUDA_DISABLE", mechanism)
    # Half of the lookups share a prefix: there are checkpoints, and windows to steal.
    table = TABLES[name]
    last = table.p[-1]
    ids = torch.randint(0, table.rows, (600,), generator=torch.Generator().manual_seed(3))
    ids[::2] = table.rows // 2 // last * last + ids[::2] % last
    call = make_call([table], batch_size=300, lengths=[1, 3] * 150, ids=ids.tolist())
    expected = expect(call).output
    for allow_tf32, tolerance in ((False, THREE_PRODUCTS), (True, ONE_PRODUCT)):
        device = Device(order=Order.RANDOM, seed=len(mechanism))
        assert_near(forward(call, device, allow_tf32=allow_tf32), expected, tolerance)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_results_do_not_depend_on_the_order(name: str, dtype: torch.dtype) -> None:
    call = make_call([TABLES[name], TABLES["16x4"]], batch_size=70, max_length=9, weighted=True)
    devices = [Device(order=Order.RANDOM, seed=seed) for seed in (1, 2, 3)]
    devices += [Device(order=order) for order in (Order.ASCENDING, Order.DESCENDING)]
    outputs = [forward(call, device, dtype, deterministic=True) for device in devices]
    assert_near(outputs[0], expect(call).output, THREE_PRODUCTS if dtype.itemsize == 4 else 4e-3)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(
    "lengths",
    [[1] * 150, [0] * 6, [0, 3000, 0, 0, 1700, 0], [0, 1, 0, 600, 2, 0, 513]],
    ids=["of one lookup", "empty", "long", "ragged"],
)
def test_bags(name: str, lengths: list[int]) -> None:
    call = make_call([TABLES[name]], batch_size=len(lengths), lengths=lengths)
    expected = expect(call).output
    for order in (Order.ASCENDING, Order.RANDOM):
        output = forward(call, Device(order=order))
        assert_near(output, expected, 2 * THREE_PRODUCTS)
        assert not output[[length == 0 for length in lengths]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype, output_dtype: torch.dtype) -> None:
    tables = [TABLES["32x8"], TABLES["padded"], TABLES["2 cores, rank 32"], TABLES["4 cores"]]
    call = make_call(tables, batch_size=40, dtype=dtype, index_dtype=torch.int32)
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.float32: 2e-6}[output_dtype]
    assert_near(forward(call, output_dtype=output_dtype), expect(call).output, tolerance)


@pytest.mark.parametrize("max_cluster", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("order", [Order.DESCENDING, Order.RANDOM], ids=["descending", "random"])
def test_cluster_sizes(max_cluster: int, order: Order) -> None:
    """Enough lookups for clusters of 16 blocks, and for parts of the bins."""
    table = Table((20, 22, 25), (4, 4, 4), (3, 2), 10_007)
    call = make_call([table], batch_size=5200, max_length=6, weighted=True)
    device = Device(40, max_cluster=max_cluster, order=order)
    assert_near(forward(call, device, allow_tf32=True), expect(call).output, ONE_PRODUCT)


@pytest.mark.parametrize("name", SOME)
def test_device_without_clusters(name: str) -> None:
    call = make_call([TABLES[name]], batch_size=200)
    device = Device(1, capability_major=8)
    assert_near(forward(call, device), expect(call).output, THREE_PRODUCTS)


@pytest.mark.parametrize("p", [(4000, 1500, 2000), (300, 300, 300, 200), (65_000, 66_000 - 536)])
def test_ids_above_2_32(p: tuple[int, ...]) -> None:
    q, ranks = ((4, 2, 4, 2)[: len(p)], (3, 4, 2)[: len(p) - 1])
    table = Table(p, q, ranks)
    last = table.rows - 1
    ids = [last, 2**31 - 1, 2**31, min(2**32, last) - 1, min(2**32, last), last - 12_345, 0, 2**24]
    call = make_call([table], batch_size=4, lengths=[3, 0, 4, 1], ids=ids)
    assert_near(forward(call), expect(call).output, THREE_PRODUCTS)


def test_rows_without_pooling() -> None:
    for name in SOME:
        call = make_call([TABLES[name]], batch_size=100, pooling_mode=NONE)
        assert_near(forward(call), expect(call).output, THREE_PRODUCTS)


def test_features_that_share_tables_and_kernels_of_every_kind() -> None:
    features = [*range(len(TABLES)), 1, 0, 11, 1, 3, 14, 14]
    call = make_call(
        list(TABLES.values()), feature_table_map=features, batch_size=9, pooling_mode=SUM
    )
    for order in ORDERS:
        assert_near(forward(call, Device(order=order)), expect(call).output, THREE_PRODUCTS)


def test_more_features_than_a_launch_takes() -> None:
    tables = [Table((3, 4, 2), (4, 4, 4), (2, 3)) for _ in range(30)]
    call = make_call(tables, feature_table_map=[*range(30), 3], batch_size=9, weighted=True)
    assert_near(forward(call), expect(call).output, THREE_PRODUCTS)
