"""Lookups without pooling: one row of the output a lookup."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.library import opcheck

from tests.gpu.calls import NONE, Call, Table, make_call
from tests.gpu.expected import assert_matches, expect, relative_error
from tests.gpu.shapes import TABLES
from tests.gpu.training import OPTIMIZERS, Training, assert_step_matches
from torchrec_flowtt.functional import tt_embedding

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# Three tables of one D, of two, three and four cores.
MIXED = (
    Table((7, 9), (4, 3), (5,)),
    Table((5, 6, 7), (3, 2, 2), (8, 3), 201),
    Table((3, 2, 4, 5), (2, 1, 3, 2), (3, 6, 2)),
)
TILED = Table((20, 22, 25), (4, 4, 8), (32, 32))


def rows_call(dtype: torch.dtype = torch.float32, seed: int = 0, **changes: object) -> Call:
    arguments = {"feature_table_map": [1, 0, 2, 1], "batch_size": 6, "seed": seed, **changes}
    return make_call(MIXED, dtype=dtype, pooling_mode=NONE, device="cuda", **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["two cores", "four cores", "prime sizes", "global scratch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tables(name: str, dtype: torch.dtype) -> None:
    call = make_call(
        TABLES[name].tables,
        batch_size=3,
        max_length=4,
        dtype=dtype,
        pooling_mode=NONE,
        device="cuda",
    )
    output = call.forward()
    assert output.shape == call.output_shape
    assert_matches(output, expect(call).output)
    grad = call.grad_output()
    core_grads, _ = expect(call).gradients(grad)
    for actual, expected in zip(call.backward(grad), core_grads, strict=True):
        assert_matches(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_features_of_several_tables(dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    call = rows_call(dtype, index_dtype=index_dtype, offset_dtype=index_dtype)
    assert_matches(call.forward(), expect(call).output)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps(optimizer: str) -> None:
    call = rows_call(torch.float64)
    training = Training(call, optimizer)
    assert_step_matches(training, call.grad_output())


def test_features_of_very_different_sizes() -> None:
    lengths = [20_000, 0, 3, 1]
    call = rows_call(batch_size=1, lengths=lengths)
    assert_matches(call.forward(), expect(call).output)


def test_more_features_than_a_launch_takes() -> None:
    group = TABLES["many tables"]
    call = group.call(pooling_mode=NONE, device="cuda")
    assert_matches(call.forward(), expect(call).output)


@pytest.mark.parametrize("path", ["auto", "tiled", "general"])
@pytest.mark.parametrize("output_dtype", DTYPES[:3], ids=str)
def test_shapes_for_the_tensor_cores(
    path: str, output_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", path)
    call = make_call(
        [TILED, TILED],
        feature_table_map=[1, 0, 1],
        batch_size=700,
        max_length=5,
        pooling_mode=NONE,
        device="cuda",
    )
    assert_matches(call.forward(output_dtype), expect(call).output)


def test_tensor_cores_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """One product of fp16 operands shows, three do not."""
    call = make_call([TILED], batch_size=3000, pooling_mode=NONE, device="cuda")
    expected = expect(call).output

    def error(allow_tf32: bool) -> float:
        return relative_error(call.forward(allow_tf32=allow_tf32), expected)

    assert error(False) < 2e-6 < error(True) < 1e-3
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", "general")
    assert error(True) < 2e-6


@pytest.mark.parametrize("batch_size", [0, 4])
def test_no_lookups(batch_size: int) -> None:
    call = rows_call(batch_size=batch_size, lengths=[0] * (4 * batch_size))
    assert call.forward().shape == (0, 12)
    grad = call.grad_output()
    for core, core_grad in zip(call.cores, call.backward(grad), strict=True):
        assert torch.equal(core_grad, torch.zeros_like(core))


def test_opcheck() -> None:
    call = rows_call()
    for core in call.cores:
        core.requires_grad_()
    opcheck(
        torch.ops.flowtt.tt_embedding_bag.default, (*call.operands(), torch.float32, False, False)
    )


def test_graph_with_changing_lookups() -> None:
    lengths = [3] * 24
    call = rows_call(lengths=lengths)
    call.forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call.forward()
    for seed in (1, 2):
        call.indices.copy_(rows_call(lengths=lengths, seed=seed).indices)
        graph.replay()
        assert_matches(output, expect(call).output)


@pytest.mark.parametrize("shape", [(), (5,), (3, 0), (40, 30, 2)])
def test_tt_embedding(shape: tuple[int, ...]) -> None:
    call = make_call([TILED], dtype=torch.float32, device="cuda")
    indices = torch.randint(0, TILED.rows, shape, device="cuda")
    output = tt_embedding(indices, call.cores)
    assert output.shape == (*shape, 128)
    expected = expect(call)
    expected.bags.indices = indices.reshape(-1).cpu()
    expected.bags.offsets = torch.tensor([0, indices.numel()])
    expected.bags.per_sample_weights = torch.ones(indices.numel())
    expected.bags.pooling_mode = NONE
    assert_matches(output.reshape(-1, 128), expected.output)


SCRIPT = """
import torch
from tests.gpu.calls import make_call
from tests.gpu.test_cuda_rows import MIXED
call = make_call(MIXED, feature_table_map=[1, 0, 1], batch_size=3, lengths=[1] * 9, pooling_mode=2,
                 device="cuda")
call.offsets[9] = 12
try:
    call.forward()
    torch.cuda.synchronize()
except Exception as error:
    print("caught", error)
"""


def test_bad_offsets_trap() -> None:
    """In a process of its own, as a trap ends the CUDA context."""
    message = "offsets of feature 2 (table 1): its bags are [6, 12), which is not a range of the 9"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert message in done.stdout and "caught" in done.stdout, done.stdout + done.stderr
