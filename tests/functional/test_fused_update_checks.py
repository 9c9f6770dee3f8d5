"""Fused steps that cannot be made are refused, and leave no trace."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import prune

from torchrec_flowtt.functional import FusedUpdate, table_batched_tt_embedding_bag, to_dense
from torchrec_flowtt.modules import TableBatchedFlowTTEmbeddingBags
from torchrec_flowtt.shapes import TTSpec


def sgd(**changes: Any) -> FusedUpdate:
    update = FusedUpdate("exact_sgd", torch.tensor(0.1), torch.tensor(0))
    return dataclasses.replace(update, **changes)


def two_tables() -> list[list[Tensor]]:
    shapes = [[(2, 1, 3, 2), (4, 2, 2, 1)], [(3, 1, 2, 2), (3, 2, 2, 1)]]
    return [[torch.ones(shape, requires_grad=True) for shape in table] for table in shapes]


def look_up(cores: list[list[Tensor]], update: FusedUpdate) -> Tensor:
    return table_batched_tt_embedding_bag(
        torch.tensor([7, 0]),
        torch.tensor([0, 1, 2]),
        cores,
        num_embeddings=[8, 9],
        feature_table_map=[0, 1],
        pooling_mode="sum",
        update=update,
    )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"learning_rate": 0.1}, TypeError, "learning_rate must be a 0-dim torch.float32 tensor"),
        ({"learning_rate": torch.ones(1)}, ValueError, r"learning_rate .* of shape \(1,\)"),
        ({"iter": 0}, TypeError, "iter must be a 0-dim torch.int64 tensor, got 0"),
        ({"iter": torch.tensor(0.0)}, ValueError, "iter must be .* got torch.float32"),
        ({"max_gradient": -1.0}, ValueError, "max_gradient must be .* at least 0, got -1.0"),
        ({"max_gradient": float("inf")}, ValueError, "max_gradient must be finite"),
        ({"optimizer": "rmsprop"}, ValueError, "one of 'exact_sgd', .*, got 'rmsprop'"),
        ({"optimizer": "none"}, ValueError, "optimizer must be one of"),
        ({"optimizer": None}, ValueError, "optimizer must be one of .*, got None"),
        ({"beta1": 1.0}, ValueError, r"beta1 must be in \[0, 1\), got 1.0"),
        ({"beta2": -0.1}, ValueError, r"beta2 must be in \[0, 1\), got -0.1"),
        ({"beta2": float("nan")}, ValueError, "beta2 must be"),
        ({"beta1": "0.9"}, TypeError, r"beta1 must be a real number, got '0.9' \(str\)"),
        ({"eps": -1e-8}, ValueError, "eps must be finite and at least 0"),
        ({"weight_decay": float("inf")}, ValueError, "weight_decay must be finite"),
        ({"momentum1": [torch.zeros(1)]}, ValueError, "momentum1 must hold no tensors .* got 1"),
        ({"optimizer": "adam"}, ValueError, "momentum1 must hold one tensor a core"),
        (
            {"optimizer": "adam", "momentum1": [torch.zeros(1)]},
            ValueError,
            "momentum2 must hold one tensor a core for optimizer 'adam', got 0",
        ),
        (
            {f"momentum{moment}": [torch.zeros(1)] for moment in (1, 2)}
            | {"optimizer": "exact_row_wise_adagrad"},
            ValueError,
            "momentum2 must hold no tensors for optimizer 'exact_row_wise_adagrad', got 1",
        ),
    ],
)
def test_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sgd(**changes)


def adagrad(cores: list[list[Tensor]]) -> FusedUpdate:
    state = [torch.zeros_like(core, requires_grad=False) for table in cores for core in table]
    return sgd(optimizer="exact_adagrad", momentum1=state)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (slice(3), ValueError, "momentum1 must hold one tensor a core, 4, got 3"),
        (1.0, TypeError, r"momentum1\[1\] must be a Tensor, got float"),
        (torch.zeros(4), ValueError, r"momentum1\[1\] must be .* shape \(4, 2, 2, 1\)"),
        (torch.zeros(4, 2, 2, 1).double(), ValueError, r"momentum1\[1\] must be .*float32"),
        (torch.zeros(4, 2, 4, 1)[:, :, ::2], ValueError, r"momentum1\[1\] must be contiguous"),
    ],
)
def test_state_of_other_cores(wrong: Any, error: type[Exception], message: str) -> None:
    cores = two_tables()
    update = adagrad(cores)
    state = list(update.momentum1)
    if isinstance(wrong, slice):
        state = state[wrong]
    else:
        state[1] = wrong
    with pytest.raises(error, match=message):
        look_up(cores, dataclasses.replace(update, momentum1=state))


def test_cores_that_cannot_be_written_to_in_place() -> None:
    cores = two_tables()
    strided = torch.ones(2, 1, 2, 3).mT.requires_grad_()
    with pytest.raises(ValueError, match=r"contiguous .* core 0 .* strides \(6, 6, 1, 3\)"):
        look_up([[strided, cores[0][1]], cores[1]], sgd())


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match=r"update must be a FusedUpdate or None, got 'x' \(str\)"):
        look_up(two_tables(), "x")  # type: ignore[arg-type]


@pytest.mark.parametrize("max_gradient", [1e5, 1e39])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_bounds_beyond_the_dtype_of_the_gradient(max_gradient: float, dtype: torch.dtype) -> None:
    clipped, plain = two_tables(), two_tables()
    for cores, is_clipped in ((clipped, True), (plain, False)):
        update = sgd(gradient_clipping=is_clipped, max_gradient=max_gradient)
        look_up(cores, update).to(dtype).sum().backward()
    assert not torch.equal(plain[0][0], torch.ones_like(plain[0][0]))
    assert all(
        torch.equal(a, b)
        for tables in zip(clipped, plain, strict=True)
        for a, b in zip(*tables, strict=True)
    )


@pytest.mark.parametrize("name", ["learning_rate", "iter", "momentum1", "momentum2"])
def test_state_without_memory_is_refused(name: str) -> None:
    """Torch sends a call with any meta tensor to the kernel that computes nothing."""
    update = FusedUpdate(
        "adam",
        torch.tensor(0.1),
        torch.tensor(0),
        *([torch.zeros_like(core) for table in two_tables() for core in table] for _ in range(2)),
    )
    state = getattr(update, name)
    meta = [*state[:-1], state[-1].to("meta")] if isinstance(state, list) else state.to("meta")
    with pytest.raises(ValueError, match=f"{name} is on the meta device"):
        look_up(two_tables(), dataclasses.replace(update, **{name: meta}))


def test_module_that_was_loaded_without_its_learning_rate_is_refused() -> None:
    spec = TTSpec.suggest(1000, 16, tt_ranks=4)
    state = TableBatchedFlowTTEmbeddingBags([spec], optimizer="adam").state_dict()
    tables = TableBatchedFlowTTEmbeddingBags([spec], optimizer="adam", device="meta")
    tables.load_state_dict(state, assign=True)
    with pytest.raises(ValueError, match="learning_rate is on the meta device"):
        tables(torch.tensor([1]), torch.tensor([0, 1]))


def test_step_that_fails_is_not_counted() -> None:
    cores = two_tables()
    update = adagrad(cores)
    output = look_up(cores, update)
    update.momentum1[1] = torch.zeros(1)  # type: ignore[index]
    with pytest.raises(ValueError, match="momentum1"):
        output.sum().backward()
    assert update.iter.item() == 0


def test_frozen_core_is_named() -> None:
    cores = two_tables()
    cores[1][1].requires_grad_(False)
    with pytest.raises(ValueError, match="got 3 of 4 that do, but not core 1 of table 1"):
        look_up(cores, sgd())


def test_pruned_core_is_used() -> None:
    spec = TTSpec.suggest(1000, 16, tt_ranks=8)
    module = TableBatchedFlowTTEmbeddingBags([spec], optimizer="none")
    for core in ("2", "0"):
        prune.random_unstructured(module.tt_cores, core, amount=0.5)
        expected = to_dense(list(module.tt_cores), 1000)[5]
        found = module(torch.tensor([5]), torch.tensor([0, 1]))[0]
        assert torch.allclose(found, expected)
