"""Modules that keep packed cores: when they pack, and what becomes of it when they are changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.functional.test_packed_cores import LOOK_UP, PACK, REPACK, Calls
from torchrec_flowtt.modules import (
    FlowTTEmbedding,
    FlowTTEmbeddingBag,
    TableBatchedFlowTTEmbeddingBags,
)
from torchrec_flowtt.modules.packed_cores import KeepsPackedCores
from torchrec_flowtt.shapes import TTSpec

ADS = TTSpec(22, 12, (2, 3, 4), (2, 3, 2), (4, 5), name="ads")
USERS = TTSpec(300, 8, (17, 18), (2, 4), (3,), name="users")
INDICES = torch.tensor([3, 21, 0, 7])
OFFSETS = torch.tensor([0, 2, 4])
PLAIN = "tt_embedding_bag"

MODULES: dict[str, Callable[[], KeepsPackedCores]] = {
    "batched": lambda: TableBatchedFlowTTEmbeddingBags([ADS, USERS], learning_rate=0.5),
    "bag": lambda: FlowTTEmbeddingBag(ADS, include_last_offset=True),
    "embedding": lambda: FlowTTEmbedding(ADS),
}


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> KeepsPackedCores:
    """One that keeps packed cores."""
    made = MODULES[request.param]()
    made.keep_packed_cores()
    return made


def call(module: KeepsPackedCores) -> torch.Tensor:
    bags = () if isinstance(module, FlowTTEmbedding) else (OFFSETS,)
    output: torch.Tensor = module(INDICES, *bags)
    return output


def look_up(module: KeepsPackedCores) -> list[str]:
    """Operators that a lookup without a gradient calls; its result is right."""
    with torch.no_grad():
        with Calls() as calls:
            output = call(module)
        plain = copy.deepcopy(module)
        plain.keep_packed_cores(False)
        assert torch.equal(output, call(plain))
    return calls.names


def test_off_unless_asked_for() -> None:
    for make in MODULES.values():
        assert look_up(make()) == [PLAIN]


def test_cores_are_packed_once(module: KeepsPackedCores) -> None:
    assert look_up(module) == [PACK, LOOK_UP]
    module.keep_packed_cores()
    assert look_up(module) == [LOOK_UP]
    module.keep_packed_cores(False)
    assert look_up(module) == [PLAIN]
    module.keep_packed_cores()
    assert look_up(module) == [PACK, LOOK_UP]


def test_training_goes_on_as_before(module: KeepsPackedCores) -> None:
    """A fused step, or one of torch's optimizers, is noticed."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    look_up(module)
    for _ in range(2):
        with Calls() as calls:
            call(module).sum().backward()
        assert calls.names and not {PACK, REPACK, LOOK_UP} & set(calls.names)
        optimizer.step()
        assert look_up(module) == [REPACK, LOOK_UP]
        assert look_up(module) == [LOOK_UP]


def test_a_frozen_module_keeps_in_any_mode(module: KeepsPackedCores) -> None:
    module.requires_grad_(False)
    with Calls() as calls:
        call(module)
    with torch.inference_mode(), calls:
        call(module)
    assert calls.names == [PACK, LOOK_UP, LOOK_UP]


def test_loading_is_noticed(module: KeepsPackedCores) -> None:
    state = copy.deepcopy(module.state_dict())
    look_up(module)
    assert module.state_dict().keys() == state.keys()
    for name in state:
        if name.startswith("tt_cores"):
            state[name] *= 2
    module.load_state_dict(state)
    assert look_up(module) == [REPACK, LOOK_UP]
    module.load_state_dict({name: value.clone() for name, value in state.items()}, assign=True)
    assert look_up(module) == [REPACK, LOOK_UP]


def test_conversions_pack_anew(module: KeepsPackedCores) -> None:
    look_up(module)
    module.to("cpu")  # they stay where they are
    assert look_up(module) == [LOOK_UP]
    for _ in range(3):
        module.double()
        module.float()
        assert look_up(module) == [PACK, LOOK_UP]


@pytest.fixture
def _swapped_parameters() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("_swapped_parameters")
def test_conversions_that_swap_parameters(module: KeepsPackedCores) -> None:
    look_up(module)
    torch.nn.Sequential(module).double()
    module.float()
    assert look_up(module) == [PACK, LOOK_UP]
    module.load_state_dict({name: value * 2 for name, value in module.state_dict().items()})
    assert look_up(module) == [REPACK, LOOK_UP]


def test_memory_formats_leave_cores_contiguous(module: KeepsPackedCores) -> None:
    """Cores have four dimensions, as images do."""
    look_up(module)
    for dtype in (torch.float32, torch.float16):
        module.to(memory_format=torch.channels_last, dtype=dtype)
        assert all(core.is_contiguous() for core in module.parameters())
        before = [core.detach().clone() for core in module.parameters()]
        call(module).float().sum().backward()
        if isinstance(module, TableBatchedFlowTTEmbeddingBags):
            assert any(
                not torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True)
            )
        else:
            assert all(core.grad is not None for core in module.parameters())
        look_up(module)


def test_changes_of_data_need_a_word(module: KeepsPackedCores) -> None:
    module.refresh_packed_cores()  # before the first lookup there is nothing to do
    look_up(module)
    next(module.parameters()).data.mul_(2)
    with Calls() as calls:
        module.refresh_packed_cores()
    assert calls.names == [REPACK]
    assert look_up(module) == [LOOK_UP]
    module.keep_packed_cores(False)
    module.refresh_packed_cores()


def test_copies_have_the_setting_alone(module: KeepsPackedCores) -> None:
    look_up(module)
    copies = (copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module)))
    for copied in copies:
        assert look_up(copied) == [PACK, LOOK_UP]
    assert look_up(module) == [LOOK_UP]
