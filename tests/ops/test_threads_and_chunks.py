"""Threads, determinism, and calls that are processed in several chunks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import torchrec_flowtt.ops  # noqa: F401
from tests import reference
from tests.ops.random_calls import Call, Table, random_call, random_grad
from tests.ops.test_lookup_values import check_forward, check_gradients
from tests.ops.test_optimizer_steps import update
from tests.reference import Optimizer
from tests.tolerances import assert_close

ops = torch.ops.flowtt


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def everything(call: Call, grad: Tensor) -> list[Tensor]:
    """Output, gradients, and weights and states after one Adam step."""
    arguments = call.bags.arguments()
    output = ops.tt_embedding_bag(call.cores, *arguments, torch.float32, False, False)
    core_grads = ops.tt_embedding_bag_backward(grad, call.cores, *arguments)
    weights_grad = ops.tt_embedding_bag_weights_grad(grad, call.cores, *arguments)
    stepped = Call([core.clone() for core in call.cores], call.bags)
    optimizer = Optimizer("adam", eps=1e-2)
    states = reference.optimizer_states(optimizer, stepped.cores)
    update(stepped, states, optimizer, grad, 1)
    return [output, *core_grads, weights_grad, *stepped.cores, *states[0], *states[1]]


CALLS = {
    "spread": dict(hot_share=0.0),
    "one hot row": dict(hot_share=0.9),
}


@pytest.mark.parametrize("name", CALLS)
def test_threads_and_runs(name: str) -> None:
    tables = [
        Table((6, 5, 40), (4, 2, 4), (8, 8)),
        Table((60, 50), (2, 16), (5,)),
        Table((3, 1, 2, 50), (2, 2, 2, 2), (4, 4, 4)),
    ]
    call = random_call(
        tables, features=[2, 0, 1, 0], batch_size=200, longest_bag=20, weighted=True, **CALLS[name]
    )
    grad = random_grad(call, torch.float32)
    results = {}
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results[threads] = everything(call, grad)
        again = everything(call, grad)
        assert all(map(torch.equal, results[threads], again)), f"{threads} threads: runs differ"
    for threads in (2, 5):
        for k, one in enumerate(results[1]):
            assert_close(results[threads][k], one.double(), f"result {k}", slack=20)


def test_more_lookups_than_a_chunk_holds() -> None:
    """D = 1 and 2.5 million lookups: bags cut between chunks, one of them twice."""
    tables = [Table((30, 20, 10), (1, 1, 1), (2, 2)), Table((40, 50), (1, 1), (2,))]
    call = random_call(tables, batch_size=3, longest_bag=0, pooling_mode=reference.MEAN)
    lengths = torch.tensor([300_001, 0, 7, 2_200_000, 0, 40_000])
    generator = torch.Generator().manual_seed(0)
    call.bags.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    call.bags.indices = torch.randint(0, 2000, (int(lengths.sum()),), generator=generator)
    call.bags.per_sample_weights = torch.rand(int(lengths.sum()), generator=generator)
    check_forward(call, torch.float32)
    check_gradients(call, random_grad(call, torch.float32))
    stepped = [core.double() for core in call.cores]
    grad = random_grad(call, torch.float32)
    optimizer = Optimizer("exact_row_wise_adagrad", eps=1e-2)
    states = reference.optimizer_states(optimizer, call.cores)
    exact_states = [[state.double() for state in part] for part in states]
    reference.step(optimizer, stepped, *exact_states, call.bags, grad, 1)
    update(call, states, optimizer, grad, 1)
    for k, core in enumerate(call.cores):
        assert_close(core, stepped[k], f"core {k}", slack=20)


def test_rows_larger_than_a_chunk() -> None:
    """D = 2^25, more than a chunk's buffers hold: one lookup after another."""
    table = Table((2, 2, 2), (512, 256, 256), (1, 1))
    cores = table.cores(torch.float32, torch.Generator().manual_seed(0))
    arguments = (cores, torch.tensor([5, 5, 0]), torch.tensor([0, 3]), None, [3], [8], [0], 0)
    output = ops.tt_embedding_bag(*arguments, torch.float32, False, False)
    first, second, third = (core[:, 0, :, 0] for core in cores)

    def row(a: int, b: int, c: int) -> Tensor:
        return torch.einsum("a,b,c->abc", first[a], second[b], third[c]).reshape(1, -1)

    torch.testing.assert_close(output, 2 * row(1, 0, 1) + row(0, 0, 0))


def test_many_empty_bags() -> None:
    """Bags without lookups beyond what a chunk has room for."""
    table = Table((5, 4, 3), (4, 4, 4), (2, 2))
    call = random_call([table], batch_size=1, longest_bag=0)
    offsets = torch.zeros(600_001, dtype=torch.int64)
    offsets[300_001:] = 1
    offsets[-1] = 3
    call.bags.offsets, call.bags.indices = offsets, torch.tensor([7, 59, 7])
    check_forward(call, torch.bfloat16)
    grad = torch.ones(1).expand(600_000, 64)
    core_grads = ops.tt_embedding_bag_backward(grad, call.cores, *call.bags.arguments())
    expected = reference.gradients(call.cores, call.bags, grad)
    for k, actual in enumerate(core_grads):
        assert_close(actual, expected.cores[k], f"gradient of core {k}")
