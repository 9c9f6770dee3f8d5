"""PackedCores: when cores are packed, and that lookups get what was packed of them last.

On the CPU nothing is kept, but the same operators are called: what they are called with is counted.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from torchrec_flowtt.functional import (
    PackedCores,
    table_batched_tt_embedding_bag,
    tt_embedding,
    tt_embedding_bag,
)

INDICES = torch.tensor([[5, 0, 7]])


class Calls(TorchDispatchMode):
    """Names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "flowtt":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


PACK, REPACK, LOOK_UP = "pack_tt_cores", "repack_tt_cores", "tt_embedding_bag_packed"


@pytest.fixture
def cores() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 1, 3, 2), (4, 2, 2, 1)]
    return [torch.rand(shape, generator=generator, requires_grad=True) for shape in shapes]


@pytest.fixture(autouse=True)
def _restored_setting() -> Iterator[None]:
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def look_up(cores: list[Tensor], packed: PackedCores, **options: Any) -> list[str]:
    """Operators that a lookup without a gradient calls; its result is right."""
    with torch.no_grad():
        expected = tt_embedding_bag(INDICES, cores, **options)
        with Calls() as calls:
            output = tt_embedding_bag(INDICES, cores, packed=packed, **options)
    assert torch.equal(output, expected)
    return calls.names


def test_cores_are_packed_once(cores: list[Tensor]) -> None:
    packed = PackedCores()
    assert look_up(cores, packed) == [PACK, LOOK_UP]
    assert look_up(cores, packed) == [LOOK_UP]
    assert look_up(list(cores), packed, mode="sum") == [LOOK_UP]
    assert packed.nbytes == 0


def test_every_function_takes_it(cores: list[Tensor]) -> None:
    packed = PackedCores()
    with torch.no_grad(), Calls() as calls:
        tt_embedding(INDICES, cores, packed=packed)
        table_batched_tt_embedding_bag(
            INDICES[0],
            torch.tensor([0, 3]),
            [cores],
            num_embeddings=[8],
            feature_table_map=[0],
            pooling_mode="sum",
            packed=packed,
        )
    assert calls.names == [PACK, LOOK_UP, LOOK_UP]


def _in_place(cores: list[Tensor]) -> None:
    with torch.no_grad():
        cores[1].mul_(2)


def _sgd(cores: list[Tensor]) -> None:
    tt_embedding_bag(INDICES, cores).sum().backward()
    torch.optim.SGD(cores, lr=0.1).step()


def _moved(cores: list[Tensor]) -> None:
    cores[0].data = cores[0].data.clone()


def _other_tensor(cores: list[Tensor]) -> None:
    cores[0] = cores[0].detach().clone()


@pytest.mark.parametrize("change", [_in_place, _sgd, _moved, _other_tensor])
def test_changes_are_noticed(cores: list[Tensor], change: Callable[[list[Tensor]], None]) -> None:
    packed = PackedCores()
    look_up(cores, packed)
    change(cores)
    assert look_up(cores, packed) == [REPACK, LOOK_UP]
    assert look_up(cores, packed) == [LOOK_UP]


def test_another_setting_takes_other_memory(cores: list[Tensor]) -> None:
    packed = PackedCores()
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    look_up(cores, packed)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert look_up(cores, packed) == [PACK, LOOK_UP]
    assert look_up(cores, packed, output_dtype=torch.float16) == [PACK, LOOK_UP]
    smaller = [core.detach()[:2].clone() for core in cores]
    with torch.no_grad(), Calls() as calls:
        tt_embedding(torch.tensor([3]), smaller, packed=packed)
    assert calls.names == [PACK, LOOK_UP]


def test_changes_of_data_need_a_word(cores: list[Tensor]) -> None:
    packed = PackedCores()
    look_up(cores, packed)
    cores[0].data.mul_(2)
    assert look_up(cores, packed) == [LOOK_UP]
    packed.invalidate()
    assert look_up(cores, packed) == [REPACK, LOOK_UP]


def test_refresh(cores: list[Tensor]) -> None:
    packed = PackedCores()
    with Calls() as calls:
        packed.refresh()  # there was no lookup
        look_up(cores, packed)
        calls.names.clear()
        packed.refresh()
        assert calls.names == []
        _in_place(cores)
        packed.refresh()
        packed.refresh()
        packed.invalidate()
        packed.refresh()
        assert calls.names == [REPACK, REPACK]


def test_memory_of_cores_that_move_is_given_back(cores: list[Tensor]) -> None:
    packed = PackedCores()
    look_up(cores, packed)
    packed.forget_moved_cores(cores)
    assert look_up(cores, packed) == [LOOK_UP]
    _moved(cores)
    packed.forget_moved_cores(cores)
    assert look_up(cores, packed) == [PACK, LOOK_UP]
    packed.forget_moved_cores([core.detach() for core in cores])
    assert look_up(cores, packed) == [PACK, LOOK_UP]


def test_training_packs_as_before(cores: list[Tensor]) -> None:
    packed = PackedCores()
    with Calls() as calls:
        tt_embedding_bag(INDICES, cores, packed=packed).sum().backward()
        frozen = [core.detach() for core in cores]
        weights = torch.ones(1, 3, requires_grad=True)
        tt_embedding_bag(INDICES, frozen, per_sample_weights=weights, packed=packed).sum()
        assert not {PACK, LOOK_UP} & set(calls.names)
        calls.names.clear()
        tt_embedding_bag(INDICES, frozen, packed=packed)
    assert calls.names == [PACK, LOOK_UP]


def test_inference_mode(cores: list[Tensor]) -> None:
    packed = PackedCores()
    with torch.inference_mode(), Calls() as calls:
        tt_embedding_bag(INDICES, cores, packed=packed)
        made_here = [core.clone() for core in cores]
        tt_embedding_bag(INDICES, made_here, packed=PackedCores())
    assert calls.names == [PACK, LOOK_UP, "tt_embedding_bag"]
    _in_place(cores)
    assert look_up(cores, packed) == [REPACK, LOOK_UP]


def test_meta_tensors(cores: list[Tensor]) -> None:
    with torch.no_grad():
        meta = [core.to("meta") for core in cores]
        output = tt_embedding(INDICES.to("meta"), meta, packed=PackedCores())
    assert output.shape == (1, 3, 6)


def test_compiled_lookups_have_the_plain_operator(cores: list[Tensor]) -> None:
    packed = PackedCores()

    def lookup(cores: list[Tensor]) -> Tensor:
        return tt_embedding_bag(INDICES, cores, mode="sum", packed=packed)

    compiled = torch.compile(lookup, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(cores), tt_embedding_bag(INDICES, cores, mode="sum"))
    assert look_up(cores, packed) == [PACK, LOOK_UP]  # there was nothing yet
    with torch.no_grad():
        assert torch.equal(compiled(cores), lookup(cores))


@pytest.mark.filterwarnings("ignore:Converting a tensor")
def test_traced_lookups_have_the_plain_operator(cores: list[Tensor]) -> None:
    """A kept copy would be a constant of the graph, which later cores have no part in."""
    packed = PackedCores()

    def lookup(indices: Tensor, *cores: Tensor) -> Tensor:
        with torch.no_grad():
            return tt_embedding_bag(indices, list(cores), packed=packed)

    for _ in range(2):
        graphs = [
            *(
                make_fx(lookup, tracing_mode=mode)(INDICES, *cores)
                for mode in ("real", "fake", "symbolic")
            ),
            torch.jit.trace(lookup, (INDICES, *cores), check_trace=False),
        ]
        doubled = [core.detach() * 2 for core in cores]
        for graph in graphs:
            assert torch.equal(graph(INDICES, *doubled), tt_embedding_bag(INDICES, doubled))
            recorded = graph.graph if isinstance(graph, torch.jit.ScriptFunction) else graph.code
            assert "tt_cores" not in str(recorded) and "_packed" not in str(recorded)
        look_up(cores, packed)  # the second time there is a copy
    with FakeTensorMode() as mode, torch.no_grad():
        fake = [mode.from_tensor(core) for core in cores]
        indices = mode.from_tensor(INDICES)
        assert tt_embedding(indices, fake, packed=packed).shape == (1, 3, 6)


def test_transforms_take_no_part_in_it(cores: list[Tensor]) -> None:
    packed = PackedCores()

    def penalty(core: Tensor) -> Tensor:
        with torch.no_grad():
            factor = tt_embedding_bag(INDICES, [core, cores[1]], packed=packed).sum()
            tt_embedding_bag(INDICES, frozen, packed=packed)
        return (core * factor).sum()

    frozen = [core.detach() for core in cores]
    factor = tt_embedding_bag(INDICES, frozen).sum()
    with Calls() as calls:
        grad = torch.func.grad(penalty)(cores[0])
    assert torch.equal(grad, factor.expand_as(grad))
    assert not {PACK, LOOK_UP} & set(calls.names)
    with pytest.raises(NotImplementedError, match="transforms of torch.func .* use backward"):
        torch.func.grad(lambda core: tt_embedding_bag(INDICES, [core, cores[1]]).sum())(cores[0])


def test_computed_cores_are_not_kept(cores: list[Tensor]) -> None:
    """They would hold what they were computed from."""
    assert look_up([core * 2 for core in cores], PackedCores()) == ["tt_embedding_bag"]


def test_tensors_can_be_swapped(cores: list[Tensor]) -> None:
    packed = PackedCores()
    look_up(cores, packed)
    torch.utils.swap_tensors(cores[1], torch.rand_like(cores[1], requires_grad=True))
    assert look_up(cores, packed) == [REPACK, LOOK_UP]


def test_other_objects_are_refused(cores: list[Tensor]) -> None:
    batched = {"num_embeddings": [8], "feature_table_map": [0], "pooling_mode": "sum"}
    calls: list[Callable[[Any], Tensor]] = [
        lambda packed: tt_embedding(INDICES, cores, packed=packed),
        lambda packed: tt_embedding_bag(INDICES, cores, packed=packed),
        lambda packed: table_batched_tt_embedding_bag(
            INDICES[0], torch.tensor([0, 3]), [cores], packed=packed, **batched
        ),
    ]
    for call in calls:
        for mode in (torch.no_grad(), torch.enable_grad()):
            with mode, pytest.raises(TypeError, match=r"packed must be .*, got 'x' \(str\)"):
                call("x")


def test_copies_are_empty(cores: list[Tensor]) -> None:
    packed = PackedCores()
    look_up(cores, packed)
    for copied in (copy.copy(packed), copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert look_up(cores, copied) == [PACK, LOOK_UP]
    assert look_up(cores, packed) == [LOOK_UP]
