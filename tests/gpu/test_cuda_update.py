"""The fused optimizer step on CUDA against the same step in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.gpu.calls import Table, make_call
from tests.gpu.shapes import TABLES
from tests.gpu.training import OPTIMIZERS, Training, assert_step_matches


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str
)
def test_steps(optimizer: str, dtype: torch.dtype) -> None:
    """Three steps on different bags, with the learning rate and the iteration on the device."""
    group = TABLES["features share tables"]
    calls = [
        make_call(
            group.tables,
            feature_table_map=group.feature_table_map,
            dtype=dtype,
            weighted=True,
            seed=seed,
            device="cuda",
        )
        for seed in range(3)
    ]
    training = Training(calls[0], optimizer)
    for number, call in enumerate(calls):
        training.call = dataclasses.replace(call, cores=training.call.cores)
        training.iter.add_(1)
        training.learning_rate.fill_(0.1 / (number + 1))
        assert_step_matches(training, call.grad_output())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["two cores", "four cores", "unused table", "many tables"])
def test_tables(optimizer: str, name: str) -> None:
    group = TABLES[name]
    call = make_call(
        group.tables,
        feature_table_map=group.feature_table_map,
        dtype=torch.float64,
        pooling_mode=1,
        device="cuda",
    )
    training = Training(call, optimizer)
    training.iter.add_(1)
    assert_step_matches(training, call.grad_output())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_global_scratch(optimizer: str) -> None:
    call = make_call(
        TABLES["global scratch"].tables, batch_size=2, dtype=torch.float64, device="cuda"
    )
    training = Training(call, optimizer)
    training.iter.add_(1)
    assert_step_matches(training, call.grad_output())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_slice_touched_once(optimizer: str) -> None:
    """More slices than blocks of a core: one step a slice on the summed gradient."""
    table = Table((3000, 2), (2, 3), (3,))
    call = make_call(
        [table],
        batch_size=2,
        lengths=[table.rows - 5, 5],
        ids=range(table.rows),
        dtype=torch.float64,
        device="cuda",
    )
    training = Training(call, optimizer)
    training.iter.add_(1)
    assert_step_matches(training, call.grad_output())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("batch_size", [0, 3])
def test_no_lookups_change_nothing(optimizer: str, batch_size: int) -> None:
    call = make_call(
        TABLES["two cores"].tables, batch_size=batch_size, lengths=[0] * batch_size, device="cuda"
    )
    training = Training(call, optimizer)
    training.iter.add_(1)
    before = [state.clone() for states in training.states() for state in states]
    training.update(call.grad_output())
    after = [state for states in training.states() for state in states]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("optimizer", ["exact_adagrad", "exact_row_wise_adagrad", "adam"])
def test_zero_gradient_with_zero_eps_stays_finite_elsewhere(optimizer: str) -> None:
    """An untouched slice has no state yet: eps = 0 must not turn it into 0 / 0."""
    call = make_call(TABLES["three cores"].tables, batch_size=1, lengths=[1], device="cuda")
    training = Training(call, optimizer, eps=0.0)
    training.iter.add_(1)
    training.update(torch.ones_like(call.grad_output()))
    assert all(core.isfinite().all() for core in call.cores)
