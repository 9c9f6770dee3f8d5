"""pooling_mode 2: one row of the output a lookup, against the dense reconstruction in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torchrec_flowtt.ops  # noqa: F401
from tests import reference
from tests.ops.call_strategies import output_dtypes, row_calls
from tests.ops.random_calls import Call, Table, random_call, random_grad
from tests.ops.test_lookup_values import check_forward, check_gradients
from tests.ops.test_optimizer_steps import OPTIMIZERS, update
from tests.reference import NONE, Optimizer
from tests.tolerances import assert_close

ops = torch.ops.flowtt
TABLES = [Table((3, 4, 5), (2, 1, 2), (3, 2)), Table((4, 3), (2, 2), (3,))]


def rows_call(dtype: torch.dtype = torch.float32) -> Call:
    return random_call(TABLES, features=[1, 0, 1], batch_size=3, dtype=dtype, pooling_mode=NONE)


@settings(max_examples=50, deadline=None)
@given(call=row_calls(), data=st.data())
def test_any_call(call: Call, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(output_dtypes(call.cores[0].dtype)))
    check_forward(call, dtype)
    check_gradients(call, random_grad(call, dtype))


def test_offsets_between_bags_do_not_matter() -> None:
    """Only where a feature begins and ends."""
    call = rows_call()
    expected = ops.tt_embedding_bag(call.cores, *call.bags.arguments(), torch.float32, False, False)
    offsets = call.bags.offsets[::3]
    bags = dataclasses.replace(call.bags, offsets=offsets)
    assert offsets.numel() == 4
    output = ops.tt_embedding_bag(call.cores, *bags.arguments(), torch.float32, False, False)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_step(name: str) -> None:
    """One step on the sum over all lookups, of all features of a table."""
    call = rows_call(torch.float64)
    optimizer = Optimizer(name, eps=1e-2)
    grad = random_grad(call, torch.float64)
    expected = [core.clone() for core in call.cores]
    states = reference.optimizer_states(optimizer, call.cores)
    exact = [[state.clone() for state in part] for part in states]
    reference.step(optimizer, expected, *exact, call.bags, grad, 1)
    update(call, states, optimizer, grad, 1)
    for k, core in enumerate(call.cores):
        assert_close(core, expected[k], f"core {k}", slack=100)


def test_opcheck_and_gradcheck() -> None:
    call = rows_call(torch.float64)
    for core in call.cores:
        core.requires_grad_()
    arguments = call.bags.arguments()
    torch.library.opcheck(
        ops.tt_embedding_bag.default, (call.cores, *arguments, torch.float64, False, False)
    )
    grad = random_grad(call, torch.float64)
    cores = [core.detach() for core in call.cores]
    torch.library.opcheck(ops.tt_embedding_bag_backward.default, (grad, cores, *arguments))

    def lookup(*cores: Tensor) -> Tensor:
        return ops.tt_embedding_bag(list(cores), *arguments, torch.float64, False, False)

    assert torch.autograd.gradcheck(lookup, tuple(call.cores))


def test_more_rows_than_a_chunk_holds() -> None:
    """1.3 million lookups of two features of one table."""
    table = Table((30, 20, 10), (1, 2, 1), (2, 2))
    call = random_call([table], features=[0, 0], batch_size=1, longest_bag=0, pooling_mode=NONE)
    generator = torch.Generator().manual_seed(0)
    call.bags.offsets = torch.tensor([0, 1_100_000, 1_300_000])
    call.bags.indices = torch.randint(0, 6000, (1_300_000,), generator=generator)
    check_forward(call, torch.float32)
    grad = random_grad(call, torch.float32)
    expected = reference.gradients(call.cores, call.bags, grad)
    actual = ops.tt_embedding_bag_backward(grad, call.cores, *call.bags.arguments())
    for k, core_grad in enumerate(actual):
        assert_close(core_grad, expected.cores[k], f"gradient of core {k}", slack=20)


def test_errors() -> None:
    call = rows_call()

    def forward(**changes: object) -> None:
        bags = dataclasses.replace(call.bags, **changes)
        ops.tt_embedding_bag(call.cores, *bags.arguments(), torch.float32, False, False)

    weights = torch.ones(call.bags.indices.numel())
    with pytest.raises(ValueError, match="per_sample_weights: expected None with pooling_mode 2"):
        forward(per_sample_weights=weights)
    with pytest.raises(ValueError, match="pooling_mode: expected 0 .* got 3"):
        forward(pooling_mode=3)
    bad = call.bags.indices.clone()
    bad[-1] = 12
    with pytest.raises(IndexError, match=r"feature 2: expected 0 to 11 \(table 1 .* got 12"):
        forward(indices=bad)
    call.cores[3] = torch.ones(4, 1, 3, 3)
    with pytest.raises(
        ValueError,
        match=r"one embedding_dim, but feature 0 \(table 1\) has 6 and feature 1 \(table 0\) has 4",
    ):
        forward()
