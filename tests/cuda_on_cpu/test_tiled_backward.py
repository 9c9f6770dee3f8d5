"""The tiled backward kernels: gradients of cores and fused steps, against float64."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.cuda_on_cpu.emulated import Device, Order, operators, order_of, two_steps
from tests.cuda_on_cpu.tiled_tables import ONE_PRODUCT, TABLES, THREE_PRODUCTS
from tests.gpu.calls import MEAN, NONE, SUM, Call, Table, make_call
from tests.gpu.expected import assert_matches, expect

TILED = ["16x4", "16x8", "32x4", "32x8", "padded", "one row"]
# Worked on in blocks.
BLOCKS = ["wide 32", "wide 64", "wide 96", "wide 128", "wide, whole blocks", "wide, 512 columns"]
BLOCKS += ["2 cores, rank 32", "2 cores, rank 64", "2 cores, rank 128"]
BLOCKS += ["4 cores", "4 cores, odd", "4 cores, ranks 64", "4 cores, one column"]
ORDERS = list(Order)


@pytest.fixture(autouse=True)
def _tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", "tiled")


def assert_near(actual: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    """By the norms of the differences of a core's slices, the slices being many."""
    for core, right in zip(actual, expected, strict=True):
        assert core.shape == right.shape and core.isfinite().all()
        slices = (core.double() - right).flatten(1).norm(dim=1)
        scale = right.norm() / right.shape[0] ** 0.5
        assert slices.norm() <= tolerance * right.norm()
        assert (slices <= 20 * tolerance * scale).all(), f"slice {int(slices.argmax())}"


def check(call: Call, device: Device, grad: Tensor | None = None, allow_tf32: bool = False) -> None:
    grad = call.grad_output() if grad is None else grad
    tolerance = ONE_PRODUCT if allow_tf32 else THREE_PRODUCTS
    tolerance += {torch.float16: 1e-3, torch.bfloat16: 6e-3}.get(call.cores[0].dtype, 0.0)
    actual = operators(device).tt_embedding_bag_backward(grad, *call.operands(), allow_tf32)
    assert_near(actual, expect(call).gradients(grad)[0], tolerance)


@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.name.lower())
def test_gradients(name: str, order: Order) -> None:
    call = make_call([TABLES[name]], batch_size=50, max_length=6, weighted=True, pooling_mode=MEAN)
    check(call, Device(order=order))


# In groups of four warps from 9 on.
CAPABILITIES = [8, 9]


@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_one_product(name: str, capability: int) -> None:
    for order, weighted in ((Order.RANDOM, True), (Order.BURSTS, False)):
        call = make_call([TABLES[name]], batch_size=50, max_length=6, weighted=weighted)
        check(call, Device(4, capability, order), allow_tf32=True)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("allow_tf32", [False, True])
def test_blocks(name: str, allow_tf32: bool) -> None:
    call = make_call([TABLES[name]], batch_size=40, max_length=6, weighted=True, pooling_mode=MEAN)
    check(call, Device(3, order=Order.BURSTS), allow_tf32=allow_tf32)


@pytest.mark.parametrize(
    "table",
    [
        Table((1, 2, 1, 2), (1, 1, 200, 200), (2, 1, 2)),
        Table((2, 2), (20_000, 2), (2,)),
        Table((2, 1, 2), (90, 100, 64), (3, 3)),
    ],
    ids=["pairs of many columns", "q1 above 16,384", "4,600 blocks"],
)
def test_sizes_beyond_the_kernels(table: Table) -> None:
    call = make_call([table], batch_size=3, max_length=2)
    grad = call.grad_output()
    actual = operators(Device(2)).tt_embedding_bag_backward(grad, *call.operands(), False)
    # The general kernel's sums of 20,000 products in fp32.
    assert_near(actual, expect(call).gradients(grad)[0], 1e-5)


@pytest.mark.parametrize(
    "name", ["16x4", "32x8", "padded", "wide, whole blocks", "2 cores, rank 64", "4 cores, odd"]
)
@pytest.mark.parametrize("allow_tf32", [False, True])
def test_what_is_not_finite_stays_where_it_is(name: str, allow_tf32: bool) -> None:
    """Slices that nobody looks up, of every core, hold infinities and what is not a number."""
    table = TABLES[name]
    ids = [i % table.rows for i in skewed_ids(random.Random(5), table.rows, 3)]
    call = make_call([table], batch_size=2, lengths=[1, 2], ids=ids)
    right = expect(call).gradients(call.grad_output())[0]
    marked = 0
    for core, gradient in zip(call.cores, right, strict=True):
        unused = (gradient == 0).flatten(1).all(1)
        core[unused] = (
            torch.tensor([torch.inf, torch.nan])
            .repeat(len(unused))[: unused.sum()]
            .view(-1, *[1] * (core.dim() - 1))
        )
        marked += int(unused.sum())
    assert marked > 3
    actual = operators(Device(3, order=Order.RANDOM)).tt_embedding_bag_backward(
        call.grad_output(), *call.operands(), allow_tf32
    )
    assert_near(actual, right, ONE_PRODUCT if allow_tf32 else THREE_PRODUCTS)


@pytest.mark.parametrize("names", [["2 cores, rank 64", "4 cores, odd"], ["4 cores", "wide 64"]])
def test_features_that_share_tables_of_any_kind(names: list[str]) -> None:
    tables = [TABLES[name] for name in names]
    for feature_table_map in ([0, 1, 0], [1, 0, 0, 1, *[1] * 21]):
        call = make_call(tables, feature_table_map=feature_table_map, batch_size=9, weighted=True)
        check(call, Device(3, order=Order.RANDOM))


def test_tables_of_four_cores_whose_pairs_do_not_fit_into_one_launch() -> None:
    # 1.6 million elements each.
    table = Table((60, 59, 50, 64), (2, 2, 4, 4), (4, 32, 3))
    call = make_call([table, table], batch_size=8, max_length=2)
    check(call, Device(4))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_whole_blocks(capability: int, dtype: torch.dtype) -> None:
    table = TABLES["wide, whole blocks"]
    call = make_call([table], batch_size=150, max_length=6, weighted=True, dtype=dtype)
    for allow_tf32 in (False, True):
        check(call, Device(3, capability, Order.RANDOM), allow_tf32=allow_tf32)


@pytest.mark.parametrize("name", ["32x8", "padded", "wide 64", "2 cores, rank 64", "4 cores, odd"])
@pytest.mark.parametrize("mode", [SUM, NONE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes_and_pooling(name: str, mode: int, dtype: torch.dtype) -> None:
    index_dtype = torch.int32 if mode == SUM else torch.int64
    tables = [TABLES[name]]
    call = make_call(tables, batch_size=60, dtype=dtype, pooling_mode=mode, index_dtype=index_dtype)
    check(call, Device(order=Order.RANDOM))


@pytest.mark.parametrize("lengths", [[0] * 6, [0, 1300, 0, 0, 520, 0], [0, 1, 0, 300, 2, 0, 255]])
def test_bags(lengths: list[int]) -> None:
    for name in ("32x8", "padded"):
        call = make_call([TABLES[name]], batch_size=len(lengths), lengths=lengths)
        check(call, Device(2, order=Order.BURSTS))


# Ids of prefixes and tables of which some slice is looked up far more often than others.
def skewed_ids(draw: random.Random, rows: int, count: int) -> list[int]:
    hot = [draw.randrange(rows) for _ in range(3)]
    near = [hot[0] - hot[0] % 25 + i for i in range(20)]
    return [
        draw.choice(hot)
        if draw.random() < 0.3
        else draw.choice(near)
        if draw.random() < 0.4
        else draw.randrange(rows)
        for _ in range(count)
    ]


@pytest.mark.parametrize("order", [Order.ASCENDING, Order.RANDOM, Order.BURSTS])
@pytest.mark.parametrize("multiprocessors", [1, 5])
@pytest.mark.parametrize(("name", "allow_tf32"), [("32x8", False), ("32x8", True), ("16x4", True)])
def test_skew_and_more_granules_than_blocks(
    order: Order, multiprocessors: int, name: str, allow_tf32: bool
) -> None:
    table = TABLES[name]
    ids = [i % table.rows for i in skewed_ids(random.Random(3), table.rows, 3_000)]
    call = make_call([table], batch_size=300, lengths=[10] * 300, ids=ids, weighted=True)
    check(call, Device(multiprocessors, order=order), allow_tf32=allow_tf32)


@pytest.mark.parametrize(
    "p", [(4000, 150, 200), (3, 60_000, 5), (60_000, 2, 7)], ids=["high", "many i2", "many i1"]
)
def test_many_slices(p: tuple[int, ...]) -> None:
    call = make_call([Table(p, (4, 2, 4), (3, 4))], batch_size=900, max_length=3)
    check(call, Device(3, order=Order.RANDOM))


def strided(grad: Tensor) -> Tensor:
    return torch.empty(grad.shape[1], grad.shape[0] + 3).T[: grad.shape[0]].copy_(grad)


def misaligned(grad: Tensor) -> Tensor:
    return torch.empty(grad.shape[0], grad.shape[1] + 1)[:, 1:].copy_(grad)


def expanded(grad: Tensor) -> Tensor:
    return grad[:1].expand(grad.shape)


@pytest.mark.parametrize("form", [strided, misaligned, expanded, Tensor.half, Tensor.bfloat16])
@pytest.mark.parametrize("name", ["32x8", "padded"])
def test_forms_of_grad_output(form: object, name: str) -> None:
    call = make_call([TABLES[name]], batch_size=30, weighted=True)
    check(call, Device(), grad=form(call.grad_output()))  # type: ignore[operator]


def test_offsets_of_bags_do_not_count_without_pooling() -> None:
    call = make_call([TABLES["32x8"]], batch_size=3, lengths=[4, 4, 4], pooling_mode=NONE)
    grad = call.grad_output()
    right = expect(call).gradients(grad)[0]
    call.offsets = torch.tensor([0, 9, 2, 12])
    actual = operators(Device()).tt_embedding_bag_backward(grad, *call.operands(), False)
    assert_near(actual, right, THREE_PRODUCTS)


@pytest.mark.parametrize("core", range(3))
def test_what_an_infinity_does_not_reach(core: int) -> None:
    """Gradients that float64 has finite, among them that of the infinite slice itself."""
    call = make_call([Table((20, 3, 25), (4, 4, 8), (32, 32))], batch_size=9, max_length=3)
    call.cores[core][1, :, 0, 0] = torch.inf
    grad = call.grad_output()
    actual = operators(Device()).tt_embedding_bag_backward(grad, *call.operands(), False)
    for found, expected in zip(actual, expect(call).gradients(grad)[0], strict=True):
        assert found[expected.isfinite()].isfinite().all()


def test_misaligned_cores() -> None:
    call = make_call([TABLES["32x8"]], batch_size=30)
    call.cores = [
        torch.empty(core.numel() + 1)[1:].view(core.shape).copy_(core) for core in call.cores
    ]
    check(call, Device())


@pytest.mark.parametrize("seed", range(12))
def test_any_tables_in_one_call(seed: int) -> None:
    draw = random.Random(seed)
    names = [draw.choice(list(TABLES)) for _ in range(draw.randint(1, 4))]
    features = [
        *range(len(names)),
        *(draw.randrange(len(names)) for _ in range(draw.randint(0, 3))),
    ]
    call = make_call(
        [TABLES[name] for name in names],
        feature_table_map=features,
        batch_size=draw.choice([7, 30, 100]),
        max_length=draw.choice([1, 6, 20]),
        weighted=draw.random() < 0.5,
        pooling_mode=draw.choice([SUM, MEAN]),
        seed=seed,
    )
    device = Device(draw.choice([1, 3, 6]), order=draw.choice(ORDERS), seed=seed)
    check(call, device, allow_tf32=draw.random() < 0.3)


@pytest.mark.parametrize("optimizer", ["exact_sgd", "exact_row_wise_adagrad", "adam"])
def test_optimizer_steps(optimizer: str) -> None:
    # Adam makes much of errors of gradients near 0, of which a wide table has some.
    wide = [] if optimizer == "adam" else ["wide 64"]
    tables = [
        TABLES[name] for name in ["padded", "32x8", "2 cores, rank 32", "4 cores, odd", *wide]
    ]
    feature_table_map = [0, 1, 2, 1, 3, len(tables) - 1, 3]
    call = make_call(tables, feature_table_map=feature_table_map, batch_size=12, weighted=True)
    for actual, expected in two_steps(call, Device(order=Order.RANDOM), optimizer):
        for tensor, other in zip(actual, expected, strict=True):
            assert_matches(tensor, other, slack=10.0)


@pytest.mark.parametrize("name", ["16x4", "32x8", "padded"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_optimizer_steps_with_one_product(name: str, capability: int) -> None:
    call = make_call([TABLES[name]], batch_size=12)
    device = Device(capability_major=capability, order=Order.RANDOM)
    steps = two_steps(call, device, "exact_row_wise_adagrad", allow_tf32=True)
    assert_near(*steps[0], ONE_PRODUCT)


ORDERED = {
    "bags of 1": {"lengths": [1] * 90},
    "bags to fold": {"batch_size": 30, "max_length": 20},
    "averaged": {"batch_size": 40, "max_length": 6, "weighted": True, "pooling_mode": MEAN},
    "no pooling": {"batch_size": 60, "pooling_mode": NONE},
    "one table, two features": {"batch_size": 25, "max_length": 5, "feature_table_map": [1, 0, 1]},
}


@pytest.mark.parametrize("name", ["32x8", "16x4", "wide 64"])
@pytest.mark.parametrize("kind", ORDERED)
def test_order_of_the_forward_pass(kind: str, name: str) -> None:
    options = {"batch_size": 90, **ORDERED[kind]}
    tables = [TABLES[name]] * (2 if "feature_table_map" in options else 1)
    call = make_call(tables, **options)
    device = Device(3, order=Order.RANDOM)
    order = order_of(call, device)
    factors = options.get("pooling_mode") == MEAN
    assert order.dtype == torch.uint8
    assert order.numel() == 256 + call.indices.numel() * (16 + 4 * factors)
    for actual, expected in two_steps(call, device, "exact_row_wise_adagrad", with_order=True):
        for tensor, other in zip(actual, expected, strict=True):
            assert_matches(tensor, other, slack=20.0)


@pytest.mark.parametrize("kind", ORDERED)
def test_order_for_dense_gradients(kind: str) -> None:
    options = {"batch_size": 90, **ORDERED[kind]}
    call = make_call([TABLES["32x8"]] * (2 if "feature_table_map" in options else 1), **options)
    grad = call.grad_output()
    device = Device(3, order=Order.RANDOM)
    order = order_of(call, device)
    arguments = (grad, *call.operands(), False, order)
    expected = expect(call).gradients(grad)[0]
    for _ in range(2):  # backward passes may share an order, one after the other
        actual = operators(device).tt_embedding_bag_backward(*arguments)
        assert_near(actual, expected, THREE_PRODUCTS)


def update(call: Call, device: Device, order: Tensor | None) -> None:
    scalars = (torch.tensor(0.1), torch.tensor(1), "exact_sgd", 1e-8, 0.9, 0.999, 0.0)
    operators(device).tt_embedding_bag_backward_update(
        call.grad_output(), call.cores, [], [], *call.arguments(), *scalars, False, order
    )


def test_order_is_left_as_it_was() -> None:
    call = make_call([TABLES["32x8"]], batch_size=30, max_length=9)
    order = order_of(call, Device())
    before = order.clone()
    update(call, Device(), order)
    assert torch.equal(order, before)


def test_no_order_of_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call([TABLES["32x8"], TABLES["16x4"]], batch_size=20)
    assert order_of(call, Device()).numel() == 0
    call = make_call([TABLES["32x8"]], batch_size=20)
    monkeypatch.setenv("FLOWTT_CUDA_DISABLE", "grouping")
    assert order_of(call, Device()).numel() == 0
    monkeypatch.delenv("FLOWTT_CUDA_DISABLE")
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", "general")
    assert order_of(call, Device()).numel() == 0


@pytest.mark.parametrize(
    "wrong", [lambda order: order[1:], Tensor.char, lambda order: order.repeat(2)[::2]]
)
def test_another_order_is_refused(wrong: object) -> None:
    call = make_call([TABLES["32x8"]], batch_size=20)
    order = order_of(call, Device())
    with pytest.raises(RuntimeError, match=f"order: expected the {order.numel()} bytes"):
        update(call, Device(), wrong(order))  # type: ignore[operator]
