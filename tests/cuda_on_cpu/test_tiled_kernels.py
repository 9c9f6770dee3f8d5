"""The tiled, wide and two-core kernels from the ids to the pooled rows, against float64."""

from __future__ import annotations

import random

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
from tests.gpu.calls import MEAN, NONE, SUM, Table, make_call, more_rows_than_slots
from tests.gpu.expected import expect


@pytest.fixture(autouse=True)
def _tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", "tiled")


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("order", list(Order), ids=lambda order: order.name.lower())
def test_three_products(name: str, order: Order) -> None:
    call = make_call([TABLES[name]], batch_size=50, max_length=6, weighted=True, pooling_mode=MEAN)
    assert_near(forward(call, Device(order=order)), expect(call).output, THREE_PRODUCTS)


@pytest.mark.parametrize("name", TABLES)
def test_one_product(name: str) -> None:
    call = make_call([TABLES[name]], batch_size=50, max_length=6, weighted=True, pooling_mode=MEAN)
    output = forward(call, Device(order=Order.RANDOM), allow_tf32=True)
    assert_near(output, expect(call).output, ONE_PRODUCT)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(
    "lengths",
    [[1] * 100, [0] * 6, [0, 1300, 0, 0, 520, 0], [0, 1, 0, 300, 2, 0, 255]],
    ids=["of one lookup", "empty", "long", "ragged"],
)
def test_bags(name: str, lengths: list[int]) -> None:
    call = make_call([TABLES[name]], batch_size=len(lengths), lengths=lengths)
    expected = expect(call).output
    for order in (Order.ASCENDING, Order.RANDOM, Order.BURSTS):
        output = forward(call, Device(order=order))
        assert_near(output, expected, 2 * THREE_PRODUCTS)
        assert not output[[length == 0 for length in lengths]].any()


@pytest.mark.parametrize("order", [Order.ASCENDING, Order.RANDOM])
@pytest.mark.parametrize(("twice", "once"), [(10_800, 0), (2_000, 8_500), (100, 10_800)])
def test_more_rows_than_slots(twice: int, once: int, order: Order) -> None:
    call = more_rows_than_slots(TABLES["32x8"], twice, once)
    output = forward(call, Device(8, order=order))
    assert_near(output, expect(call).output, THREE_PRODUCTS)


# Slots of rows of 128 columns that three products, or one, buffer in calls of few lookups.
SLOTS, ONE_PRODUCT_SLOTS = 8_192, 16_384


@pytest.mark.parametrize(
    ("name", "multiprocessors", "lookups"),
    [
        ("wide 64", 3, SLOTS),
        ("wide 64", 3, SLOTS + 1),
        ("wide 64", 5, SLOTS + 3),
        ("wide 64", 132, SLOTS + 4),
        ("wide 64", 132, SLOTS + 124),
        ("2 cores, rank 64", 5, SLOTS // 4 + 2),
        ("2 cores, rank 64", 132, SLOTS // 4 + 64),
        ("32x8", 3, SLOTS + 1),
    ],
)
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_about_as_many_slots_as_lookups(
    name: str, multiprocessors: int, lookups: int, output_dtype: torch.dtype
) -> None:
    """Slots are dealt out to blocks, and rounded up: there may be enough but for one block."""
    lengths = [4] * (lookups // 4 - 1)
    lengths.append(lookups - sum(lengths))
    call = make_call([TABLES[name]], batch_size=len(lengths), lengths=lengths)
    output = forward(call, Device(multiprocessors), output_dtype)
    tolerance = 2 * THREE_PRODUCTS if output_dtype == torch.float32 else 4e-3
    assert_near(output, expect(call).output, tolerance)


@pytest.mark.parametrize("order", list(Order), ids=lambda order: order.name.lower())
def test_as_many_slots_of_one_product(order: Order) -> None:
    lengths = [4] * (ONE_PRODUCT_SLOTS // 4 - 1) + [5]
    call = make_call([TABLES["wide 64"]], batch_size=len(lengths), lengths=lengths)
    output = forward(call, Device(5, order=order), allow_tf32=True)
    assert_near(output, expect(call).output, ONE_PRODUCT)


@pytest.mark.parametrize("name", SOME)
def test_offsets_of_bags_do_not_count_without_pooling(name: str) -> None:
    call = make_call([TABLES[name]], batch_size=3, lengths=[4, 4, 4], pooling_mode=NONE)
    output = forward(call)
    call.offsets = torch.tensor([0, 9, 2, 12])
    assert torch.equal(forward(call), output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype, output_dtype: torch.dtype) -> None:
    tables = [TABLES["32x8"], TABLES["padded"], TABLES["2 cores, rank 32"], TABLES["4 cores"]]
    call = make_call(tables, batch_size=40, dtype=dtype, index_dtype=torch.int32)
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.float32: 2e-6}[output_dtype]
    assert_near(forward(call, output_dtype=output_dtype), expect(call).output, tolerance)


@pytest.mark.parametrize("p", [(4000, 1500, 2000), (300, 300, 300, 200), (65_000, 65_464)])
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


# Of the kernels for any ranks, whose tables share shared memory of which each needs another part.
MIXED = [
    [Table((40, 40, 40), q, (128, 128)) for q in [(4, 4, 8), (4, 4, 4), (4, 2, 4)]],
    [TABLES["4 cores, one column"], TABLES["4 cores"]],
    [Table((40, 40, 40), q, (32, 32)) for q in [(1, 2, 16), (8, 4, 8)]],
]


@pytest.mark.parametrize("tables", MIXED, ids=["ranks 128", "4 cores", "ranks 32"])
@pytest.mark.parametrize("order", [Order.ASCENDING, Order.RANDOM, Order.BURSTS])
def test_shapes_that_share_a_launch(tables: list[Table], order: Order) -> None:
    call = make_call(tables, batch_size=100, max_length=12)
    assert_near(forward(call, Device(3, order=order)), expect(call).output, THREE_PRODUCTS)


@pytest.mark.parametrize("seed", range(24))
def test_any_tables_in_one_call(seed: int) -> None:
    draw = random.Random(seed)
    tables = [TABLES[draw.choice(list(TABLES))] for _ in range(draw.randint(2, 4))]
    call = make_call(
        tables,
        batch_size=draw.choice([7, 30, 100]),
        max_length=draw.choice([1, 6, 20, 60]),
        weighted=draw.random() < 0.5,
        seed=seed,
    )
    device = Device(draw.choice([1, 3, 6]), order=draw.choice(list(Order)), seed=seed)
    assert_near(forward(call, device), expect(call).output, 2 * THREE_PRODUCTS)


def test_features_that_share_tables_and_kernels_of_every_kind() -> None:
    features = [*range(len(TABLES)), 1, 0, 11, 1, 3, 14, 14]
    call = make_call(
        list(TABLES.values()), feature_table_map=features, batch_size=5, pooling_mode=SUM
    )
    device = Device(order=Order.RANDOM)
    assert_near(forward(call, device), expect(call).output, THREE_PRODUCTS)


def test_more_features_than_a_launch_takes() -> None:
    tables = [Table((3, 4, 2), (4, 4, 4), (2, 3)) for _ in range(30)]
    call = make_call(tables, feature_table_map=[*range(30), 3], batch_size=9, weighted=True)
    assert_near(forward(call), expect(call).output, THREE_PRODUCTS)
