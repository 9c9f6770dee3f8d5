"""PyTorch's settings for TF32 and for determinism reach the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchrec_flowtt.functional import table_batched_tt_embedding_bag, tt_embedding_bag
from torchrec_flowtt.functional.torch_settings import determinism_required, tf32_allowed
from torchrec_flowtt.modules import FlowTTEmbeddingBag, TableBatchedFlowTTEmbeddingBags
from torchrec_flowtt.shapes import TTSpec


class _Lookups(TorchDispatchMode):
    """Records the settings that every lookup is given, and every backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.allow_tf32: list[bool] = []
        self.deterministic: list[bool] = []
        self.deterministic_backward: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.flowtt.tt_embedding_bag.default:
            self.allow_tf32.append(args[-2])
            self.deterministic.append(args[-1])
        if func in (
            torch.ops.flowtt.tt_embedding_bag_backward.default,
            torch.ops.flowtt.tt_embedding_bag_backward_update.default,
        ):
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.deterministic_backward.append(given.get("deterministic", False))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _restored_setting() -> Iterator[None]:
    # Both, as torch refuses to read the older setting while the newer one says something else.
    before = torch.backends.cuda.matmul.fp32_precision
    older = torch.backends.cuda.matmul.allow_tf32
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.backends.cuda.matmul.allow_tf32 = older
    torch.backends.cuda.matmul.fp32_precision = before
    torch.use_deterministic_algorithms(deterministic)


def _older_setting() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def _newer_setting() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


@pytest.mark.parametrize("allow", [_older_setting, _newer_setting])
def test_setting_is_read_at_every_lookup(allow: Callable[[], None]) -> None:
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    cores = [torch.ones(2, 1, 2, 1), torch.ones(3, 1, 2, 1)]
    indices = torch.tensor([[5, 0]])
    with _Lookups() as lookups:
        tt_embedding_bag(indices, cores, mode="sum")
        allow()
        assert tf32_allowed()
        tt_embedding_bag(indices, cores, mode="sum")
        table_batched_tt_embedding_bag(
            indices[0],
            torch.tensor([0, 2]),
            [cores],
            num_embeddings=[6],
            feature_table_map=[0],
            pooling_mode="sum",
        )
    assert lookups.allow_tf32 == [False, True, True]


def test_determinism_is_read_at_every_lookup() -> None:
    cores = [torch.ones(2, 1, 2, 1), torch.ones(3, 1, 2, 1)]
    indices = torch.tensor([[5, 0]])
    with _Lookups() as lookups:
        tt_embedding_bag(indices, cores, mode="sum")
        torch.use_deterministic_algorithms(True)
        assert determinism_required()
        tt_embedding_bag(indices, cores, mode="sum")
    assert lookups.deterministic == [False, True]


def _function() -> Callable[[], Tensor]:
    cores = [torch.ones(2, 1, 2, 1, requires_grad=True), torch.ones(3, 1, 2, 1, requires_grad=True)]
    return lambda: tt_embedding_bag(torch.tensor([[5, 0]]), cores, mode="sum")


def _module() -> Callable[[], Tensor]:
    module = FlowTTEmbeddingBag(TTSpec(6, 4, (2, 3), (2, 2), (2,)))
    return lambda: module(torch.tensor([[5, 0]]))


def _fused() -> Callable[[], Tensor]:
    module = TableBatchedFlowTTEmbeddingBags([TTSpec(6, 4, (2, 3), (2, 2), (2,))])
    return lambda: module(torch.tensor([5, 0]), torch.tensor([0, 2]))


@pytest.mark.parametrize("make", [_function, _module, _fused])
def test_determinism_is_read_at_every_backward(make: Callable[[], Callable[[], Tensor]]) -> None:
    lookup = make()
    with _Lookups() as lookups:
        for setting in (False, True, False):
            torch.use_deterministic_algorithms(setting)
            lookup().sum().backward()
        # As with torch's own operators it is the setting of the backward pass that counts.
        output = lookup()
        torch.use_deterministic_algorithms(True)
        output.sum().backward()
    assert lookups.deterministic_backward == [False, True, False, True]


def test_a_graph_keeps_the_setting_that_it_was_made_with() -> None:
    """Of the operator, whose derivative torch.compile takes."""
    cores = [torch.ones(2, 1, 2, 1, requires_grad=True), torch.ones(3, 1, 2, 1, requires_grad=True)]
    bags = (torch.tensor([5, 0]), torch.tensor([0, 2]), None, [2], [6], [0], 0, torch.float32)
    with _Lookups() as lookups:
        for deterministic in (False, True):
            output = torch.ops.flowtt.tt_embedding_bag(cores, *bags, False, deterministic)
            output.sum().backward()
    assert lookups.deterministic_backward == [False, True]
