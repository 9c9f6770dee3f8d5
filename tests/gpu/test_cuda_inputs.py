"""Inputs at the edges: huge ids and tables, views, misaligned tensors, poisoned memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.gpu.calls import NONE, SUM, Call, Table, make_call
from tests.gpu.expected import assert_matches, expect
from tests.gpu.training import Training, assert_step_matches

PATHS = ["general", "tiled"]
TILED = Table((20, 22, 25), (4, 4, 8), (32, 32))
GENERAL = Table((7, 9, 4), (4, 3, 5), (5, 6))


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels of the forward pass; tables without a tiling take the general ones anyway."""
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", request.param)
    return str(request.param)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Deterministic mode of torch, in which it also fills uninitialised memory with NaN."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


HUGE = {
    "2 cores": Table((2**17, 2**16), (4, 2), (3,)),
    "3 cores": Table((2048, 2048, 2048), (2, 4, 4), (4, 6)),
    "4 cores": Table((512, 256, 256, 256), (2, 2, 2, 2), (2, 3, 2)),
    "tiling": Table((4096, 1024, 2048), (4, 4, 4), (16, 16)),
}


@pytest.mark.parametrize("name", HUGE)
@pytest.mark.parametrize("pooling_mode", [SUM, NONE])
def test_table_of_2_33_rows(name: str, path: str, pooling_mode: int) -> None:
    table = HUGE[name]
    assert table.rows == 2**33
    ids = [
        2**33 - 1,
        2**24,
        2**24 + 1,
        2**31 - 1,
        2**31,
        2**32 - 1,
        2**32,
        2**33 - 2**20,
        0,
        12_345,
    ]
    call = make_call(
        [table],
        batch_size=4,
        lengths=[3, 0, 6, 1],
        ids=ids,
        pooling_mode=pooling_mode,
        device="cuda",
    )
    assert_matches(call.forward(), expect(call).output)


def test_gradients_of_a_table_of_2_33_rows() -> None:
    ids = [2**33 - 1, 2**24 + 1, 2**31, 2**32 + 5, 0]
    call = make_call([HUGE["3 cores"]], batch_size=2, lengths=[2, 3], ids=ids, device="cuda")
    grad = call.grad_output()
    core_grads, weights_grad = expect(call).gradients(grad)
    for actual, expected in zip(call.backward(grad), core_grads, strict=True):
        assert_matches(actual, expected)
    assert_matches(call.weights_grad(grad), weights_grad)


@pytest.mark.parametrize(
    "table",
    [
        Table((3000, 2500), (4, 8), (6,)),
        Table((1100, 1500, 1300), (4, 4, 4), (16, 16)),
        Table((1100, 1500, 1300), (3, 2, 5), (5, 7)),
        Table((40, 1500, 1200, 50), (2, 2, 2, 2), (2, 3, 2)),
    ],
    ids=lambda table: f"{len(table.p)} cores, ranks {table.ranks}",
)
def test_every_slice_of_cores_larger_than_a_block(table: Table, path: str) -> None:
    """More slices than a block has threads, each of them looked up."""
    numbers = torch.arange(max(table.p))
    ids = torch.zeros_like(numbers)
    for factor in table.p:
        ids = ids * factor + numbers % factor
    batch_size = ids.numel()
    call = make_call(
        [table], batch_size=batch_size, lengths=[1] * batch_size, ids=ids.tolist(), device="cuda"
    )
    expected = expect(call)
    assert all(touched.all() for touched in expected.touched_slices())
    assert_matches(call.forward(), expected.output)
    if path == "general":
        grad = call.grad_output()
        core_grads, _ = expected.gradients(grad)
        for actual, wanted in zip(call.backward(grad), core_grads, strict=True):
            assert_matches(actual, wanted)


def shifted(tensor: Tensor) -> Tensor:
    """The same values one element into a storage, so that no vector of them is aligned."""
    storage = tensor.new_empty(tensor.numel() + 1)
    return storage[1:].view(tensor.shape).copy_(tensor)


def strided(tensor: Tensor) -> Tensor:
    """The same values, every other element of a storage."""
    return torch.stack([tensor, torch.zeros_like(tensor)], dim=-1)[..., 0]


def with_inputs(call: Call, change: str) -> Call:
    moved = {"shifted": shifted, "strided": strided}[change]
    call.cores = [moved(core) for core in call.cores]
    call.indices, call.offsets = moved(call.indices), moved(call.offsets)
    assert call.per_sample_weights is not None
    call.per_sample_weights = moved(call.per_sample_weights)
    return call


@pytest.mark.parametrize("change", ["shifted", "strided"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("table", [TILED, GENERAL], ids=["tiling", "general"])
def test_misaligned_and_strided_inputs(
    change: str, dtype: torch.dtype, table: Table, path: str
) -> None:
    call = make_call([table], batch_size=70, dtype=dtype, weighted=True, device="cuda")
    expected = expect(call)
    call = with_inputs(call, change)
    assert_matches(call.forward(), expected.output)
    if path == "general":
        grad = call.grad_output()
        core_grads, weights_grad = expected.gradients(grad)
        for actual, wanted in zip(call.backward(grad), core_grads, strict=True):
            assert_matches(actual, wanted)
        assert_matches(call.weights_grad(grad), weights_grad)


def test_misaligned_cores_are_updated_in_place() -> None:
    call = make_call([TILED], batch_size=5, dtype=torch.float64, device="cuda")
    call.cores = [shifted(core) for core in call.cores]
    training = Training(call, "exact_adagrad")
    assert_step_matches(training, call.grad_output())


@pytest.mark.parametrize("table", [TILED, GENERAL], ids=["tiling", "general"])
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_filled_with_nan(
    table: Table, output_dtype: torch.dtype, path: str, deterministic: None
) -> None:
    """Outputs and workspaces start as NaN: whatever is not written or cleared shows."""
    call = make_call(
        [table, GENERAL],
        feature_table_map=[0, 1, 0],
        batch_size=900,
        max_length=5,
        weighted=True,
        device="cuda",
    )
    assert torch.empty(4, device="cuda").isnan().all()
    assert_matches(call.forward(output_dtype), expect(call).output)
    if output_dtype == torch.float32:
        grad = call.grad_output()
        core_grads, weights_grad = expect(call).gradients(grad)
        for actual, wanted in zip(call.backward(grad), core_grads, strict=True):
            assert_matches(actual, wanted, slack=3)
        assert_matches(call.weights_grad(grad), weights_grad)


@pytest.mark.parametrize("pooling_mode", [0, 1, 2])
def test_repeated_runs_are_bit_identical(
    pooling_mode: int, deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bags of up to 40 lookups, summed in one order by the general kernel."""
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", "general")
    call = make_call(
        [TILED], batch_size=2000, max_length=40, pooling_mode=pooling_mode, device="cuda"
    )
    first = call.forward()
    assert all(torch.equal(call.forward(), first) for _ in range(4))
