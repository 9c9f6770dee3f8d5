"""Bad arguments: the type of the error, and that it names what is wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import torchrec_flowtt.ops  # noqa: F401
from tests import reference
from tests.ops.random_calls import Call, Table, random_call
from tests.ops.test_optimizer_steps import update
from tests.reference import Optimizer

ops = torch.ops.flowtt
TABLES = [Table((3, 4, 5), (2, 1, 2), (3, 2)), Table((4, 3), (2, 3), (3,), 11)]


@pytest.fixture
def call() -> Call:
    return random_call(TABLES, features=[0, 1], batch_size=3, longest_bag=4, seed=1)


def forward(call: Call, output_dtype: torch.dtype = torch.float32, **changes: Any) -> None:
    bags = dataclasses.replace(call.bags, **changes)
    ops.tt_embedding_bag(call.cores, *bags.arguments(), output_dtype, False, False)


def test_packing(call: Call) -> None:
    tables = (call.cores, *call.bags.arguments()[3:5])
    with pytest.raises(ValueError, match="output_dtype: expected float32, float16 or bfloat16"):
        ops.pack_tt_cores(*tables, torch.float64, False)
    with pytest.raises(ValueError, match="the tables have 3 cores together, got 5"):
        ops.pack_tt_cores(call.cores, [3], [60], torch.float32, False)
    with pytest.raises(ValueError, match="num_embeddings: expected 2 values, one per table, got 1"):
        ops.repack_tt_cores(torch.empty(0), *tables[:2], [60], torch.float32, False)


@pytest.mark.parametrize("value", [-1, 11, 2**40])
def test_index_out_of_range(call: Call, value: int) -> None:
    call.bags.indices[-1] = value
    position = call.bags.indices.numel() - 1
    message = rf"indices\[{position}\] of feature 1: expected 0 to 10 \(table 1 .* got {value}"
    with pytest.raises(IndexError, match=message):
        forward(call)
    with pytest.raises(IndexError, match=message):
        ops.tt_embedding_bag_backward(torch.ones(3, 10), call.cores, *call.bags.arguments())


def test_first_of_several_bad_indices_is_named(call: Call) -> None:
    call.bags.indices[3:] = 1000
    with pytest.raises(IndexError, match=r"indices\[3\]"):
        forward(call)


def test_nothing_is_updated_when_an_index_is_bad(call: Call) -> None:
    call.bags.indices[-1] = 99
    before = [core.clone() for core in call.cores]
    with pytest.raises(IndexError):
        update(call, ([], []), Optimizer("exact_sgd"), torch.ones(3, 10), 1)
    assert all(map(torch.equal, call.cores, before))


def test_offsets(call: Call) -> None:
    offsets = call.bags.offsets
    with pytest.raises(ValueError, match=r"offsets\[0\]: expected 0, got 1"):
        forward(call, offsets=offsets + 1)
    beyond = offsets.clone()
    beyond[3] = call.bags.indices.numel() + 4
    with pytest.raises(ValueError, match=r"offsets\[3\]: expected at most the number of indices"):
        forward(call, offsets=beyond)
    decreasing = offsets.clone()
    decreasing[4] = decreasing[3] - 1
    with pytest.raises(ValueError, match=r"offsets\[3\].*offsets\[4\].*feature 1, bag 0"):
        forward(call, offsets=decreasing)
    short = offsets.clone()
    short[-1] = call.bags.indices.numel() + 2
    with pytest.raises(ValueError, match=r"offsets\[6\]: expected the number of indices"):
        forward(call, offsets=short)
    with pytest.raises(ValueError, match=r"offsets: expected F \* B \+ 1 values for F = 2"):
        forward(call, offsets=offsets[:-1])
    with pytest.raises(ValueError, match="offsets: expected F"):
        forward(call, offsets=offsets[:0])
    with pytest.raises(ValueError, match="offsets: expected dtype int64 or int32, got float32"):
        forward(call, offsets=offsets.float())


@pytest.mark.parametrize("pooling_mode", [0, 1, 2])
def test_indices_without_bags(call: Call, pooling_mode: int) -> None:
    """An offset alone means that there are no bags, so there must be no indices."""
    none = call.bags.offsets[:1]
    changes = {"offsets": none, "pooling_mode": pooling_mode, "feature_table_map": [0, 0]}
    count = call.bags.indices.numel()
    message = f"offsets: expected bags for the {count} indices, got one value"
    with pytest.raises(ValueError, match=message):
        forward(call, **changes)
    bags = dataclasses.replace(call.bags, **changes)
    rows = count if pooling_mode == 2 else 0
    grad = torch.ones(rows, 4 if pooling_mode == 2 else 8)
    with pytest.raises(ValueError, match=message):
        ops.tt_embedding_bag_backward(grad, call.cores, *bags.arguments())
    forward(call, indices=call.bags.indices[:0], **changes)


def test_bags_and_tables(call: Call) -> None:
    with pytest.raises(ValueError, match="indices: expected one dimension"):
        forward(call, indices=call.bags.indices[None])
    with pytest.raises(ValueError, match="indices: expected dtype int64 or int32"):
        forward(call, indices=call.bags.indices.to(torch.int16))
    with pytest.raises(ValueError, match=r"per_sample_weights: expected dtype float32"):
        forward(call, per_sample_weights=call.bags.indices.double())
    with pytest.raises(ValueError, match=r"per_sample_weights: expected shape"):
        forward(call, per_sample_weights=torch.ones(2))
    with pytest.raises(ValueError, match=r"feature_table_map\[1\]: expected a table in 0 to 1"):
        forward(call, feature_table_map=[0, 2])
    with pytest.raises(ValueError, match="feature_table_map: expected at least one"):
        forward(call, feature_table_map=[])
    with pytest.raises(ValueError, match="table 1: num_embeddings: expected 0 to 12"):
        forward(call, num_embeddings=[60, 13])
    with pytest.raises(ValueError, match="num_embeddings: expected 2 values"):
        forward(call, num_embeddings=[60])
    with pytest.raises(ValueError, match="pooling_mode: expected 0"):
        forward(call, pooling_mode=3)
    with pytest.raises(ValueError, match="output_dtype: expected float32"):
        forward(call, output_dtype=torch.float64)


def test_cores(call: Call) -> None:
    with pytest.raises(ValueError, match="the tables have 3 cores together, got 5"):
        forward(call, cores_per_table=[3], num_embeddings=[60], feature_table_map=[0, 0])
    with pytest.raises(ValueError, match="table 0: cores_per_table: expected 2 to 4 cores, got 1"):
        forward(call, cores_per_table=[1, 4])
    with pytest.raises(ValueError, match="need more cores than the 5 given"):
        forward(call, cores_per_table=[3, 3])
    good = call.cores
    call.cores = [*good[:1], good[1][:, :2], *good[2:]]
    with pytest.raises(ValueError, match=r"table 0: core 1: expected left rank 3"):
        forward(call)
    call.cores = [*good[:1], good[1].half(), *good[2:]]
    with pytest.raises(ValueError, match="core 0 is float32 and core 1 is float16"):
        forward(call)
    call.cores = [*good[:4], good[4].squeeze(-1)]
    with pytest.raises(ValueError, match=r"table 1: core 1: expected shape \[p, left rank"):
        forward(call)
    call.cores = [core.long() for core in good]
    with pytest.raises(ValueError, match="cores: expected dtype float32"):
        forward(call)


def test_more_rows_than_int64(call: Call) -> None:
    p = 2**22
    core = torch.ones(1).expand(p, 1, 1, 1)
    with pytest.raises(ValueError, match="product of p_shapes does not fit int64"):
        ops.tt_embedding_bag(
            [core] * 3, torch.tensor([0]), torch.tensor([0, 1]), None, [3], [1], [0], 0,
            torch.float32, False, False,
        )  # fmt: skip


def test_grad_output(call: Call) -> None:
    arguments = (call.cores, *call.bags.arguments())
    with pytest.raises(ValueError, match=r"grad_output: expected shape \[3, 10\], got \[3, 9\]"):
        ops.tt_embedding_bag_backward(torch.ones(3, 9), *arguments)
    with pytest.raises(ValueError, match="grad_output: dtype float64 does not go with float32"):
        ops.tt_embedding_bag_weights_grad(torch.ones(3, 10).double(), *arguments)


def test_optimizer_arguments(call: Call) -> None:
    grad = torch.ones(3, 10)
    momentum = [torch.zeros_like(core) for core in call.cores]
    with pytest.raises(ValueError, match="optimizer: expected exact_sgd, .* got 'lamb'"):
        update(call, ([], []), Optimizer("lamb"), grad, 1)
    with pytest.raises(ValueError, match="momentum1: expected 5 tensors, got 0"):
        update(call, ([], []), Optimizer("exact_adagrad"), grad, 1)
    with pytest.raises(ValueError, match="momentum1: expected 0 tensors, got 5"):
        update(call, (momentum, []), Optimizer("exact_sgd"), grad, 1)
    with pytest.raises(ValueError, match=r"momentum1\[0\]: expected a contiguous tensor of one"):
        update(call, (momentum, []), Optimizer("exact_row_wise_adagrad"), grad, 1)
    half = [state.half() for state in momentum]
    with pytest.raises(ValueError, match=r"momentum1\[0\]: expected dtype float32, got float16"):
        update(call, (half, []), Optimizer("exact_adagrad"), grad, 1)
    call.cores[0] = call.cores[0].repeat_interleave(2, dim=0)[::2]
    with pytest.raises(ValueError, match="core 0: the fused update writes in place"):
        update(call, ([], []), Optimizer("exact_sgd"), grad, 1)


def test_non_contiguous_inputs_are_read_right(call: Call) -> None:
    expected = reference.embedding_bag(call.cores, call.bags)
    cores = [core.transpose(1, 3).contiguous().transpose(1, 3) for core in call.cores]
    indices = call.bags.indices.repeat_interleave(2)[::2]
    bags = dataclasses.replace(call.bags, indices=indices)
    output = ops.tt_embedding_bag(cores, *bags.arguments(), torch.float32, False, False)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
