"""The operators as torch sees them: opcheck, autograd, and errors of bad arguments."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.library import opcheck

from tests.gpu.calls import Call, Table, make_call
from tests.gpu.training import OPTIMIZERS, Training


def small_call(dtype: torch.dtype = torch.float32, weighted: bool = True) -> Call:
    tables = [Table((3, 2), (2, 2), (2,)), Table((2, 2, 2), (2, 1, 2), (2, 3))]
    return make_call(
        tables,
        feature_table_map=[1, 0, 1],
        batch_size=3,
        dtype=dtype,
        weighted=weighted,
        device="cuda",
    )


def requiring_gradients(call: Call) -> Call:
    for tensor in (*call.cores, call.per_sample_weights):
        if tensor is not None:
            tensor.requires_grad_()
    return call


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck_forward(weighted: bool, dtype: torch.dtype) -> None:
    call = requiring_gradients(small_call(dtype, weighted))
    opcheck(
        torch.ops.flowtt.tt_embedding_bag.default, (*call.operands(), torch.float32, False, False)
    )


def test_opcheck_gradients() -> None:
    call = small_call()
    arguments = (call.grad_output(), *call.operands())
    opcheck(torch.ops.flowtt.tt_embedding_bag_backward.default, arguments)
    opcheck(torch.ops.flowtt.tt_embedding_bag_weights_grad.default, arguments)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_opcheck_update(optimizer: str) -> None:
    training = Training(small_call(), optimizer)
    opcheck(
        torch.ops.flowtt.tt_embedding_bag_backward_update.default,
        training.arguments(training.call.grad_output()),
    )


@pytest.mark.parametrize("pooling_mode", [0, 1])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradcheck(pooling_mode: int, deterministic: bool) -> None:
    call = requiring_gradients(small_call(torch.float64))
    call.pooling_mode = pooling_mode
    cores, indices, offsets, weights, *rest = call.operands()
    count = len(cores)

    def lookup(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.ops.flowtt.tt_embedding_bag(
            list(tensors[:count]),
            indices,
            offsets,
            tensors[count],
            *rest,
            torch.float64,
            False,
            deterministic,
        )

    # Atomic sums come in any order.
    tolerance = 0.0 if deterministic else 1e-12
    assert torch.autograd.gradcheck(lookup, (*cores, weights), nondet_tol=tolerance)


@pytest.mark.parametrize("path", ["general", "tiled"])
def test_compiled_lookup(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile traces through the operators and their derivatives."""
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", path)
    tables = [Table((20, 22, 25), (4, 4, 8), (32, 32)), Table((7, 9), (4, 3), (5,))]
    call = requiring_gradients(make_call(tables, batch_size=50, weighted=True, device="cuda"))

    def loss(scale: torch.Tensor) -> torch.Tensor:
        output = torch.ops.flowtt.tt_embedding_bag(*call.operands(), torch.float32, False, False)
        return (scale * output).square().mean()

    leaves = [*call.cores, call.per_sample_weights]
    scale = torch.tensor(2.0, device="cuda")
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(loss(scale), leaves)
    for actual, wanted in zip(torch.autograd.grad(compiled(scale), leaves), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-7)


def test_indices_on_the_cpu_are_an_error() -> None:
    call = small_call()
    call.indices = call.indices.cpu()
    with pytest.raises((RuntimeError, ValueError), match="indices.*device"):
        call.forward()


def test_oversized_levels_are_an_error() -> None:
    """A level of more than 2^30 elements is refused by name, before anything is launched."""
    half = torch.float16
    call = Call(
        cores=[
            torch.empty((1, 1, 1, 2**15), dtype=half, device="cuda"),
            torch.empty((1, 2**15, 2**16, 1), dtype=half, device="cuda"),
        ],
        indices=torch.zeros(1, dtype=torch.int64, device="cuda"),
        offsets=torch.tensor([0, 1], device="cuda"),
        per_sample_weights=None,
        cores_per_table=[2],
        num_embeddings=[1],
        feature_table_map=[0],
        pooling_mode=0,
    )
    with pytest.raises(RuntimeError, match="table 0.*tt_ranks"):
        call.forward()


BAD_LOOKUPS = {
    "id too large": (
        "call.indices[1] = 60",
        r"feature 0 (table 0), indices[1] = 60, expected 0 <= index < num_embeddings = 60",
    ),
    "negative id": (
        "call.indices[2] = -1",
        r"feature 0 (table 0), indices[2] = -1, expected 0 <= index < num_embeddings = 60",
    ),
    "decreasing offsets": (
        "call.offsets[1] = 3; call.offsets[2] = 2",
        r"offsets of feature 0 (table 0), bag 1: [3, 2) is not a range of the 6 indices",
    ),
    "offsets past the end": (
        "call.offsets[3] = 1000000",
        r"offsets of feature 0 (table 0), bag 2: [4, 1000000) is not a range of the 6 indices",
    ),
}

BAD_LOOKUP_SCRIPT = """
import sys
import torch
from tests.gpu.calls import Table, make_call
table = Table((3, 4, 5), (4, 4, 4), (16, 16))  # 60 rows; it has a tiling
call = make_call([table], batch_size=3, lengths=[2, 2, 2], device="cuda")
grad = call.grad_output()
exec(sys.argv[1])
torch.cuda.synchronize()
operators = {
    "forward": call.forward,
    "backward": lambda: call.backward(grad),
    "deterministic backward": lambda: call.backward(grad, deterministic=True),
    "weights_grad": lambda: call.weights_grad(grad),
}
try:
    operators[sys.argv[2]]()
    torch.cuda.synchronize()
except Exception as error:
    print("caught", error)
"""


@pytest.mark.parametrize(
    ("kind", "operator", "path"),
    [
        ("id too large", "forward", "general"),
        ("id too large", "forward", "tiled"),
        ("negative id", "backward", "general"),
        ("negative id", "deterministic backward", "general"),
        ("decreasing offsets", "deterministic backward", "general"),
        ("offsets past the end", "deterministic backward", "general"),
        ("decreasing offsets", "weights_grad", "general"),
        ("decreasing offsets", "forward", "tiled"),
        ("offsets past the end", "forward", "general"),
        ("offsets past the end", "forward", "tiled"),
    ],
)
def test_bad_lookups_trap(kind: str, operator: str, path: str) -> None:
    """In a process of its own, as a trap ends the CUDA context."""
    mutation, message = BAD_LOOKUPS[kind]
    done = subprocess.run(
        [sys.executable, "-c", BAD_LOOKUP_SCRIPT, mutation, operator],
        env={**os.environ, "FLOWTT_CUDA_FORWARD": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert message in done.stdout, done.stdout + done.stderr
    assert "caught" in done.stdout, done.stdout + done.stderr
