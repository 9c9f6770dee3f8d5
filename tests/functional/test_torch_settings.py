"""PyTorch's settings for TF32 and for determinism reach the operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchrec_flowtt.functional import table_batched_tt_embedding_bag, tt_embedding_bag
from torchrec_flowtt.functional.torch_settings import determinism_required, tf32_allowed


class _Lookups(TorchDispatchMode):
    """Records the settings that every forward lookup is given."""

    def __init__(self) -> None:
        super().__init__()
        self.allow_tf32: list[bool] = []
        self.deterministic: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.flowtt.tt_embedding_bag.default:
            self.allow_tf32.append(args[-2])
            self.deterministic.append(args[-1])
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _restored_setting() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
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
