"""The fused optimizer step on CUDA against the same step in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.gpu.calls import Table, make_call
from tests.gpu.shapes import TABLES
from tests.gpu.training import OPTIMIZERS, Training, assert_step_matches
from torchrec_flowtt.modules import TableBatchedFlowTTEmbeddingBags
from torchrec_flowtt.shapes import TTSpec


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str
)
def test_steps(optimizer: str, dtype: torch.dtype) -> None:
    """Three steps on different bags, with the learning rate and the iteration on the device."""
    group = TABLES["features share tables"]
    calls = [group.call(dtype=dtype, weighted=True, seed=seed, device="cuda") for seed in range(3)]
    training = Training(calls[0], optimizer)
    for number, call in enumerate(calls):
        training.call = dataclasses.replace(call, cores=training.call.cores)
        training.learning_rate.fill_(0.1 / (number + 1))
        assert_step_matches(training, call.grad_output())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["two cores", "four cores", "unused table", "many tables"])
def test_tables(optimizer: str, name: str) -> None:
    group = TABLES[name]
    call = group.call(dtype=torch.float64, pooling_mode=1, device="cuda")
    training = Training(call, optimizer)
    assert_step_matches(training, call.grad_output())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_global_scratch(optimizer: str) -> None:
    call = make_call(
        TABLES["global scratch"].tables, batch_size=2, dtype=torch.float64, device="cuda"
    )
    training = Training(call, optimizer)
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
    assert_step_matches(training, call.grad_output())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("batch_size", [0, 3])
def test_no_lookups_change_nothing(optimizer: str, batch_size: int) -> None:
    call = make_call(
        TABLES["two cores"].tables, batch_size=batch_size, lengths=[0] * batch_size, device="cuda"
    )
    training = Training(call, optimizer)
    before = [state.clone() for states in training.states() for state in states]
    training.update(call.grad_output())
    after = [state for states in training.states() for state in states]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("optimizer", ["exact_adagrad", "exact_row_wise_adagrad", "adam"])
def test_zero_gradient_with_zero_eps_stays_finite_elsewhere(optimizer: str) -> None:
    """An untouched slice has no state yet: eps = 0 must not turn it into 0 / 0."""
    call = make_call(TABLES["three cores"].tables, batch_size=1, lengths=[1], device="cuda")
    training = Training(call, optimizer, eps=0.0)
    training.update(torch.ones_like(call.grad_output()))
    assert all(core.isfinite().all() for core in call.cores)


@pytest.mark.parametrize(
    ("dtype", "distance"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)], ids=str
)
def test_stochastic_rounding(dtype: torch.dtype, distance: float) -> None:
    """A quarter of the distance to the next value below 1 is stepped in one of four elements."""
    rows, columns = 500, 64
    modules = [
        TableBatchedFlowTTEmbeddingBags(
            [TTSpec(rows, columns, (rows, 1), (columns, 1), (1,))],
            learning_rate=distance / 4,
            stochastic_rounding=stochastic,
            weights_precision=dtype,
            device="cuda",
        )
        for stochastic in (True, True, False)
    ]
    for module in modules:
        for core in module.tt_cores:
            core.data.fill_(1.0)
        output = module(torch.arange(rows, device="cuda"), torch.arange(rows + 1, device="cuda"))
        output.backward(torch.ones_like(output))
    stepped, again, nearest = (module.tt_cores[0].detach().double() for module in modules)
    assert torch.equal(stepped, again) and (nearest == 1.0).all()
    lower = stepped == 1.0 - distance
    assert ((stepped == 1.0) | lower).all()
    assert abs(lower.double().mean().item() - 0.25) < 5 * (0.1875 / lower.numel()) ** 0.5
