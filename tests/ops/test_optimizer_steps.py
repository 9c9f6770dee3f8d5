"""The fused backward and update: values of weights and states against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torchrec_flowtt.ops  # noqa: F401
from tests import reference
from tests.ops.call_strategies import calls, output_dtypes
from tests.ops.random_calls import Call, Table, random_call, random_grad
from tests.reference import Optimizer
from tests.tolerances import assert_close

OPTIMIZERS = ("exact_sgd", "exact_adagrad", "exact_row_wise_adagrad", "adam")


def update(
    call: Call, states: tuple[list[Tensor], ...], optimizer: Optimizer, grad: Tensor, iteration: int
) -> None:
    steps = torch.tensor(iteration - 1)
    torch.ops.flowtt.tt_embedding_bag_backward_update(
        grad,
        call.cores,
        *states,
        *call.bags.arguments(),
        torch.tensor(optimizer.learning_rate, dtype=torch.float32),
        steps,
        optimizer.name,
        optimizer.eps,
        optimizer.beta1,
        optimizer.beta2,
        optimizer.weight_decay,
    )
    assert steps.item() == iteration


def check_steps(call: Call, optimizer: Optimizer, output_dtype: torch.dtype, steps: int) -> None:
    """Several steps, each with another gradient, next to float64 copies."""
    states = reference.optimizer_states(optimizer, call.cores)
    exact_cores = [core.double().clone() for core in call.cores]
    exact_states = tuple([state.double().clone() for state in part] for part in states)
    before = [core.clone() for core in call.cores]
    for iteration in range(1, steps + 1):
        grad = random_grad(call, output_dtype, seed=iteration)
        update(call, states, optimizer, grad, iteration)
        reference.step(optimizer, exact_cores, *exact_states, call.bags, grad, iteration)
    touched = reference.touched_slices(call.cores, call.bags)
    for k, core in enumerate(call.cores):
        assert_close(core, exact_cores[k], f"core {k}", slack=20)
        assert torch.equal(core[~touched[k]], before[k][~touched[k]])
    for part, exact_part in zip(states, exact_states, strict=True):
        for k, state in enumerate(part):
            # Later gradients are taken at weights rounded to the cores' dtype.
            slack = 50 if call.cores[0].dtype in (torch.float32, torch.float64) else 2e4
            assert_close(state, exact_part[k], f"state of core {k}", slack=slack)
            assert not state[~touched[k]].any()


@settings(max_examples=25, deadline=None)
@given(
    call=calls(),
    name=st.sampled_from(OPTIMIZERS),
    weight_decay=st.sampled_from((0.0, 0.1)),
    data=st.data(),
)
def test_steps_of_any_call(call: Call, name: str, weight_decay: float, data: st.DataObject) -> None:
    # With eps this large, adaptive steps depend smoothly on the gradient, as a comparison needs.
    optimizer = Optimizer(name, eps=0.1, weight_decay=weight_decay)
    dtype = data.draw(st.sampled_from(output_dtypes(call.cores[0].dtype)))
    check_steps(call, optimizer, dtype, steps=2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_duplicates_are_summed_before_the_step(name: str) -> None:
    """One lookup twice equals one lookup of twice the gradient: states see the sum, once."""
    table = Table((4, 5, 6), (2, 2, 4), (4, 4))
    optimizer = Optimizer(name)
    twice = random_call([table], batch_size=2, longest_bag=0, dtype=torch.float64)
    twice.bags.indices = torch.tensor([17, 17])
    twice.bags.offsets = torch.tensor([0, 1, 2])
    once = Call([core.clone() for core in twice.cores], random_call([table]).bags)
    once.bags.indices = torch.tensor([17])
    once.bags.offsets = torch.tensor([0, 1])
    grad = random_grad(once, torch.float64)
    states = [reference.optimizer_states(optimizer, call.cores) for call in (twice, once)]
    for iteration in (1, 2):
        update(twice, states[0], optimizer, grad.expand(2, -1), iteration)
        update(once, states[1], optimizer, 2 * grad, iteration)
    for k, core in enumerate(twice.cores):
        assert_close(core, once.cores[k], f"core {k}")
    for ours, theirs in zip(states[0], states[1], strict=True):
        for k, state in enumerate(ours):
            assert_close(state, theirs[k], f"state of core {k}")


def test_features_of_one_table_step_once() -> None:
    """A table read by three features gets one step on the sum over all of them."""
    tables = [Table((4, 5, 6), (2, 2, 4), (4, 4)), Table((5, 7), (2, 3), (3,))]
    call = random_call(tables, features=[0, 1, 0, 0], batch_size=9, dtype=torch.float64)
    check_steps(call, Optimizer("adam", eps=1e-4), torch.float64, steps=3)


def test_zero_gradient_still_decays_the_states_of_touched_slices() -> None:
    """Adam steps on every slice that is looked up, whatever its gradient."""
    call = random_call([Table((4, 5, 6), (2, 2, 4), (4, 4))], dtype=torch.float64)
    optimizer = Optimizer("adam")
    states = reference.optimizer_states(optimizer, call.cores)
    update(call, states, optimizer, random_grad(call, torch.float64), 1)
    before = [state.clone() for state in states[0]]
    update(call, states, optimizer, torch.zeros(5, call.columns, dtype=torch.float64), 2)
    for k, touched in enumerate(reference.touched_slices(call.cores, call.bags)):
        torch.testing.assert_close(states[0][k][touched], before[k][touched] * 0.9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_lookups_changes_nothing(name: str) -> None:
    call = random_call([Table((4, 5, 6), (2, 2, 4), (4, 4))], longest_bag=0)
    optimizer = Optimizer(name)
    states = reference.optimizer_states(optimizer, call.cores)
    before = [core.clone() for core in call.cores]
    update(call, states, optimizer, torch.ones(5, 16), 1)
    assert all(map(torch.equal, call.cores, before))
    assert not any(state.any() for part in states for state in part)
