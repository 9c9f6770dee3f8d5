"""Schemas, fake kernels and autograd: opcheck and gradcheck for every operator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchrec_flowtt.ops  # noqa: F401
from tests import reference
from tests.ops.random_calls import Call, Table, random_call, random_grad
from tests.ops.test_optimizer_steps import OPTIMIZERS
from tests.reference import Optimizer

ops = torch.ops.flowtt
TABLES = [Table((3, 4, 5), (2, 1, 2), (3, 2)), Table((4, 3), (2, 3), (3,))]


def mixed_call(dtype: torch.dtype, weighted: bool = True, pooling_mode: int = 1) -> Call:
    return random_call(
        TABLES,
        features=[1, 0, 1],
        batch_size=3,
        dtype=dtype,
        weighted=weighted,
        pooling_mode=pooling_mode,
    )


def leaves(call: Call) -> Call:
    for core in call.cores:
        core.requires_grad_()
    if call.bags.per_sample_weights is not None:
        call.bags.per_sample_weights.requires_grad_()
    return call


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_forward(dtype: torch.dtype, weighted: bool) -> None:
    call = leaves(mixed_call(dtype, weighted))
    arguments = (call.cores, *call.bags.arguments(), torch.float32, False, False)
    torch.library.opcheck(ops.tt_embedding_bag.default, arguments)


def test_opcheck_forward_with_order() -> None:
    call = mixed_call(torch.float32, True)
    arguments = (call.cores, *call.bags.arguments(), torch.float32, False, False)
    torch.library.opcheck(ops.tt_embedding_bag_with_order.default, arguments)
    output, order = ops.tt_embedding_bag_with_order(*arguments)
    assert torch.equal(output, ops.tt_embedding_bag(*arguments))
    assert order.numel() == 0 and order.dtype == torch.uint8


def test_opcheck_packed_cores() -> None:
    call = mixed_call(torch.float32)
    tables = (call.cores, *call.bags.arguments()[3:5], torch.float32, False)
    torch.library.opcheck(ops.pack_tt_cores.default, tables)
    packed = ops.pack_tt_cores(*tables)
    assert packed.dtype == torch.uint8 and packed.numel() == 0
    torch.library.opcheck(ops.repack_tt_cores.default, (packed, *tables))
    arguments = (*call.bags.arguments(), torch.float32, False, False)
    torch.library.opcheck(ops.tt_embedding_bag_packed.default, (call.cores, packed, *arguments))
    output = ops.tt_embedding_bag_packed(call.cores, packed, *arguments)
    assert torch.equal(output, ops.tt_embedding_bag(call.cores, *arguments))


def test_packed_cores_have_no_derivative() -> None:
    call = leaves(mixed_call(torch.float32))
    arguments = (*call.bags.arguments(), torch.float32, False, False)
    packed = ops.pack_tt_cores(call.cores, *arguments[3:5], torch.float32, False)
    output = ops.tt_embedding_bag_packed(call.cores, packed, *arguments)
    with pytest.raises(RuntimeError, match="tt_embedding_bag_packed has no derivative"):
        output.sum().backward()


def test_compiled_packing() -> None:
    call = mixed_call(torch.float32)
    arguments = (*call.bags.arguments(), torch.float32, False, False)

    def lookup(cores: list[Tensor]) -> Tensor:
        packed = ops.pack_tt_cores(cores, *arguments[3:5], torch.float32, False)
        return ops.tt_embedding_bag_packed(cores, packed, *arguments)

    # How much is packed only the library knows.
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(lookup, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(call.cores), lookup(call.cores))


@pytest.mark.parametrize("operator", ["tt_embedding_bag_backward", "tt_embedding_bag_weights_grad"])
def test_opcheck_gradients(operator: str) -> None:
    call = mixed_call(torch.float32)
    arguments = (random_grad(call, torch.float32), call.cores, *call.bags.arguments())
    torch.library.opcheck(getattr(ops, operator).default, arguments)


def test_opcheck_deterministic_gradients() -> None:
    """On the CPU they are those of the other mode."""
    call = mixed_call(torch.float32)
    arguments = (random_grad(call, torch.float32), call.cores, *call.bags.arguments(), False, None)
    torch.library.opcheck(ops.tt_embedding_bag_backward.default, (*arguments, True))
    modes = [ops.tt_embedding_bag_backward(*arguments, mode) for mode in (False, True)]
    assert all(torch.equal(core, other) for core, other in zip(*modes, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_opcheck_update(name: str, deterministic: bool) -> None:
    call = mixed_call(torch.float32)
    states = reference.optimizer_states(Optimizer(name), call.cores)
    grad = random_grad(call, torch.float32)
    arguments = (grad, call.cores, *states, *call.bags.arguments())
    scalars = (torch.tensor(0.1), torch.tensor(1), name, 1e-8, 0.9, 0.999, 0.0)
    switches = (False, None, False, deterministic)
    torch.library.opcheck(
        ops.tt_embedding_bag_backward_update.default, (*arguments, *scalars, *switches)
    )


@pytest.mark.parametrize("pooling_mode", [reference.SUM, reference.MEAN])
def test_gradcheck_in_cores_and_weights(pooling_mode: int) -> None:
    call = leaves(mixed_call(torch.float64, pooling_mode=pooling_mode))
    bags = call.bags

    def lookup(weights: Tensor, *cores: Tensor) -> Tensor:
        return ops.tt_embedding_bag(
            list(cores), bags.indices, bags.offsets, weights, *bags.arguments()[3:],
            torch.float64, False, False,
        )  # fmt: skip

    assert torch.autograd.gradcheck(lookup, (bags.per_sample_weights, *call.cores))


def test_only_the_gradients_asked_for() -> None:
    call = mixed_call(torch.float32)
    call.cores[1].requires_grad_()
    output = ops.tt_embedding_bag(call.cores, *call.bags.arguments(), torch.float32, False, False)
    output.sum().backward()
    expected = reference.gradients(call.cores, call.bags, torch.ones_like(output))
    torch.testing.assert_close(call.cores[1].grad.double(), expected.cores[1], rtol=1e-5, atol=1e-5)
    assert call.cores[0].grad is None and call.bags.per_sample_weights.grad is None
    call.bags.per_sample_weights.requires_grad_()
    call.cores[1].requires_grad_(False)
    output = ops.tt_embedding_bag(call.cores, *call.bags.arguments(), torch.float32, False, False)
    output.sum().backward()
    torch.testing.assert_close(
        call.bags.per_sample_weights.grad.double(), expected.weights, rtol=1e-5, atol=1e-5
    )


def test_second_derivative_is_an_error() -> None:
    call = leaves(mixed_call(torch.float64))
    output = ops.tt_embedding_bag(call.cores, *call.bags.arguments(), torch.float64, False, False)
    (first,) = torch.autograd.grad(output.square().sum(), call.cores[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once only"):
        first.sum().backward()


def test_meta_tensors_give_shapes() -> None:
    call = mixed_call(torch.bfloat16)
    cores = [core.to("meta") for core in call.cores]
    bags = call.bags
    output = ops.tt_embedding_bag(
        cores, bags.indices.to("meta"), bags.offsets.to("meta"), None, *bags.arguments()[3:],
        torch.float16, False, False,
    )  # fmt: skip
    assert output.shape == (3, call.columns) and output.dtype == torch.float16


def test_compiled_lookup_and_gradients() -> None:
    call = leaves(mixed_call(torch.float32))

    def loss(cores: list[Tensor]) -> Tensor:
        output = ops.tt_embedding_bag(cores, *call.bags.arguments(), torch.float32, False, False)
        return output.square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    expected = torch.autograd.grad(loss(call.cores), call.cores)
    actual = torch.autograd.grad(compiled(call.cores), call.cores)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
