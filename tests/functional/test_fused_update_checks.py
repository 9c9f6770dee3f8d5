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
        ({"max_gradient": -1.0}, ValueError, "max_gradient must be at least 0, got -1.0"),
    ],
)
def test_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        look_up(two_tables(), sgd(**changes))


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
    update = sgd(optimizer="exact_adagrad", momentum1=[torch.zeros(1)] * 4)
    output = look_up(two_tables(), update)
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
