"""The backward pass whose sums have one order: values, and the same bits in every order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.cuda_on_cpu.emulated import Device, Order, operators, two_steps
from tests.gpu.calls import MEAN, NONE, SUM, Call, Table, make_call
from tests.gpu.expected import are_equal, assert_matches, expect
from tests.gpu.shapes import SMALL, TABLES, one

# Prefix products that do not fit into shared memory.
GLOBAL_SCRATCH = one((2, 2, 2), (16, 8, 4), (1024, 128))
# Of blocks and threads that come in different orders, on devices of different sizes.
DEVICES = [
    *(Device(order=order) for order in (Order.ASCENDING, Order.DESCENDING)),
    *(Device(multiprocessors=3, order=Order.RANDOM, seed=seed) for seed in (1, 2)),
    Device(multiprocessors=9, order=Order.BURSTS),
]
FEW_DEVICES = [DEVICES[0], DEVICES[3], DEVICES[4]]


def gradients(
    call: Call, grad: Tensor, device: Device | None = None, deterministic: bool = True
) -> list[Tensor]:
    found: list[Tensor] = operators(device or Device()).tt_embedding_bag_backward(
        grad, *call.operands(), False, None, deterministic
    )
    return found


def check(call: Call, grad: Tensor | None = None, device: Device | None = None) -> None:
    grad = call.grad_output() if grad is None else grad
    right = expect(call).gradients(grad)[0]
    for core, expected in zip(gradients(call, grad, device), right, strict=True):
        assert_matches(core, expected)


def skewed_call(tables: list[Table], features: list[int], **options: object) -> Call:
    """Bags of which some are empty and some long; a third of the lookups are of one row."""
    lengths = [(7 * i * i) % 11 if i % 3 else 0 for i in range(len(features) * 9)]
    rows = [
        tables[table].rows
        for f, table in enumerate(features)
        for _ in range(sum(lengths[9 * f : 9 * (f + 1)]))
    ]
    ids = [(i * i + 5 * i) % row if i % 3 else row // 2 for i, row in enumerate(rows)]
    return make_call(
        tables, feature_table_map=features, batch_size=9, lengths=lengths, ids=ids, **options
    )


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("mode", [SUM, MEAN])
def test_tables(name: str, mode: int) -> None:
    tables = TABLES[name]
    call = tables.call(weighted=True, pooling_mode=mode)
    check(call, device=Device(multiprocessors=3, order=Order.RANDOM))


SHAPES = {
    "2 cores": Table((7, 9), (4, 3), (5,), 60),
    "3 cores": Table((5, 6, 7), (2, 4, 4), (8, 3), 201),
    "4 cores": Table((3, 2, 4, 5), (2, 1, 3, 2), (3, 6, 2)),
    "wide": Table((4, 3, 5), (4, 2, 4), (70, 33)),
    "a fast path": Table((20, 22, 25), (4, 4, 8), (32, 32)),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_ragged_bags_of_repeated_ids(name: str, dtype: torch.dtype) -> None:
    call = skewed_call(
        [SHAPES[name]],
        [0, 0],
        dtype=dtype,
        weighted=True,
        index_dtype=torch.int32,
        pooling_mode=MEAN,
    )
    check(call, device=Device(order=Order.BURSTS))


@pytest.mark.parametrize("name", SHAPES)
def test_rows_without_pooling(name: str) -> None:
    call = skewed_call([SHAPES[name]], [0, 0, 0], pooling_mode=NONE, offset_dtype=torch.int32)
    right = expect(call).gradients(call.grad_output())[0]
    call.offsets[1:9] = 77  # only those between features count
    for core, expected in zip(gradients(call, call.grad_output()), right, strict=True):
        assert_matches(core, expected)


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda grad: grad.t().contiguous().t(),
    "shifted": lambda grad: torch.cat([grad, grad], 1)[:, 1 : grad.shape[1] + 1],
    "expanded": lambda grad: grad[:1].expand(grad.shape),
    "half": Tensor.half,
    "bfloat16": Tensor.bfloat16,
}


@pytest.mark.parametrize("form", STRIDED)
def test_forms_of_grad_output(form: str) -> None:
    call = skewed_call([SHAPES["3 cores"], SHAPES["2 cores"]], [1, 0, 1])
    check(call, grad=STRIDED[form](call.grad_output()))


@pytest.mark.parametrize("lengths", [[0] * 6, [0, 700, 0, 0, 33, 0], [1, 0, 15, 1, 0, 0, 255]])
def test_pieces_of_one_slice(lengths: list[int]) -> None:
    """One row, so that every piece but the first is carried over; and rows that alternate."""
    for ids in ([17] * sum(lengths), [17, 18] * (sum(lengths) // 2) + [0] * (sum(lengths) % 2)):
        call = make_call(
            [SHAPES["3 cores"]], batch_size=len(lengths), lengths=lengths, ids=ids, weighted=True
        )
        grad = call.grad_output()
        for core, expected in zip(
            gradients(call, grad, Device(2, order=Order.RANDOM)),
            expect(call).gradients(grad)[0],
            strict=True,
        ):
            assert_matches(core, expected, slack=4)


def test_pieces_of_large_slices() -> None:
    """Slices of 4 MB, of which sums are kept for 16 pieces of a range."""
    call = make_call(
        [Table((2, 2, 2), (1, 1, 1), (1024, 1024))],
        batch_size=10,
        lengths=[30] * 10,
        ids=[(i * i) % 8 for i in range(300)],
    )
    grad = call.grad_output()
    for core, expected in zip(gradients(call, grad), expect(call).gradients(grad)[0], strict=True):
        assert_matches(core, expected, slack=4)


def test_more_than_a_range_of_lookups() -> None:
    """Of the smallest rows, for the sake of time: 2^18 lookups are sorted at once."""
    count = 2**18 + 77
    ids = torch.randint(0, 6, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    lengths = [count // 2, count - count // 2]
    call = make_call(
        [Table((2, 3), (1, 1), (1,))],
        batch_size=2,
        lengths=lengths,
        ids=ids,
        dtype=torch.float64,
    )
    grad = call.grad_output()
    for core, expected in zip(gradients(call, grad), expect(call).gradients(grad)[0], strict=True):
        torch.testing.assert_close(core, expected, rtol=1e-9, atol=0.0)


def test_scratch_in_global_memory() -> None:
    check(make_call(GLOBAL_SCRATCH.tables, batch_size=3, max_length=2, weighted=True))


def test_misaligned_cores() -> None:
    call = skewed_call([SHAPES["a fast path"]], [0])
    call.cores = [
        torch.empty(core.numel() + 1)[1:].view(core.shape).copy_(core) for core in call.cores
    ]
    check(call)


BAD = {
    "an id that is too large": lambda call: call.indices.__setitem__(3, 10**6),
    "a negative id": lambda call: call.indices.__setitem__(3, -1),
    "offsets that decrease": lambda call: call.offsets.__setitem__(4, 1),
    "offsets beyond the end": lambda call: call.offsets.__setitem__(-1, 10**6),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_lookups_trap(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    call = skewed_call([SHAPES["3 cores"]], [0])
    grad = call.grad_output()
    BAD[kind](call)
    with pytest.raises(RuntimeError, match="cudaErrorLaunchFailure"):
        gradients(call, grad)
    captured = capfd.readouterr()
    assert "trap" in captured.err
    assert "feature 0 (table 0)" in captured.out


SHARED = [SHAPES["3 cores"], SHAPES["2 cores"], SHAPES["4 cores"], SHAPES["a fast path"]]
FEATURES = [3, 0, 1, 0, 2, 3]


@pytest.mark.parametrize("path", ["general", "tiled"])
def test_without_it_the_order_shows(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the next test can fail."""
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", path)
    call = skewed_call(SHARED, FEATURES, weighted=True)
    grad = call.grad_output()
    results = [gradients(call, grad, device, deterministic=False) for device in DEVICES]
    assert not are_equal(results)
    fast_path = [result[-3:] for result in results]
    assert not are_equal(fast_path)


@pytest.mark.parametrize("mode", [SUM, MEAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gradients_do_not_depend_on_the_order(mode: int, dtype: torch.dtype) -> None:
    call = skewed_call(SHARED, FEATURES, weighted=True, pooling_mode=mode, dtype=dtype)
    grad = call.grad_output()
    check(call, grad)
    assert are_equal([gradients(call, grad, device) for device in DEVICES])


@pytest.mark.parametrize("name", SHAPES)
def test_rows_without_pooling_do_not_depend_on_the_order(name: str) -> None:
    call = skewed_call([SHAPES[name]], [0, 0], pooling_mode=NONE)
    grad = call.grad_output()
    assert are_equal([gradients(call, grad, device) for device in DEVICES])


def test_more_features_than_a_launch_takes() -> None:
    """The last feature shares a table with the first, which another launch has summed."""
    tables = TABLES["many tables"]
    call = tables.call(weighted=True)
    grad = call.grad_output()
    assert are_equal([gradients(call, grad, device) for device in FEW_DEVICES])


@pytest.mark.parametrize("mode", [SUM, MEAN, NONE])
def test_gradients_of_weights_never_depend_on_the_order(mode: int) -> None:
    tables = [SHAPES["3 cores"]] if mode == NONE else SHARED
    call = skewed_call(tables, [0, 0] if mode == NONE else FEATURES, pooling_mode=mode)
    grad = call.grad_output()
    assert are_equal(
        [
            [operators(device).tt_embedding_bag_weights_grad(grad, *call.operands())]
            for device in DEVICES
        ]
    )


def stepped(
    device: Device, optimizer: str, dtype: torch.dtype, deterministic: bool
) -> list[Tensor]:
    """Cores and states after two steps."""
    call = skewed_call(SHARED, FEATURES, weighted=True, dtype=dtype)
    states = two_steps(call, device, optimizer, deterministic=deterministic)
    return [tensor for found, _ in states for tensor in found]


@pytest.mark.parametrize("optimizer", ["exact_adagrad", "exact_row_wise_adagrad", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_steps_do_not_depend_on_the_order(optimizer: str, dtype: torch.dtype) -> None:
    assert are_equal([stepped(device, optimizer, dtype, True) for device in FEW_DEVICES])
    assert not are_equal([stepped(device, optimizer, dtype, False) for device in FEW_DEVICES])


@pytest.mark.parametrize("optimizer", ["exact_sgd", "exact_row_wise_adagrad", "adam"])
def test_steps(optimizer: str) -> None:
    call = skewed_call(SHARED[:3], [0, 2, 1, 0], weighted=True)
    device = Device(order=Order.RANDOM)
    for actual, expected in two_steps(call, device, optimizer, deterministic=True):
        for tensor, other in zip(actual, expected, strict=True):
            assert_matches(tensor, other, slack=10.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_stochastic_rounding_is_repeated(dtype: torch.dtype) -> None:
    results = []
    for device in FEW_DEVICES:
        call = skewed_call([SHAPES["3 cores"]], [0, 0], weighted=True, dtype=dtype)
        scalars = (torch.tensor(0.1), torch.tensor(1), "exact_sgd", 1e-8, 0.9, 0.999, 0.0)
        operators(device).tt_embedding_bag_backward_update(
            call.grad_output(),
            call.cores,
            [],
            [],
            *call.arguments(),
            *scalars,
            False,
            None,
            True,
            True,
        )
        results.append(call.cores)
    assert are_equal(results)


def test_there_is_no_order_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", "tiled")
    call = skewed_call([SHAPES["a fast path"]], [0])
    ops = operators(Device())
    for deterministic in (False, True):
        output, order = ops.tt_embedding_bag_with_order(
            *call.operands(), torch.float32, False, deterministic
        )
        assert_matches(output, expect(call).output)
        assert (order.numel() == 0) == deterministic
