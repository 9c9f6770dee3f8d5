"""Optimizer steps against FBGEMM's table-batched embeddings on the CPU.

A TT table whose only long core holds whole rows ([N, 1, D, 1], followed by a core of one 1) is a
dense table, and its core slices are the rows FBGEMM steps on.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchrec_flowtt.ops  # noqa: F401
from tests.ops.random_calls import Call
from tests.ops.test_optimizer_steps import update
from tests.reference import Bags, Optimizer, optimizer_states
from torchrec_flowtt.functional.fused_update import FusedUpdate, fused_lookup
from torchrec_flowtt.functional.lookup import BatchedLookup

tbe = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
embedding_configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")

N, D, B = 19, 8, 6


def dense_as_tensor_train(rows: Tensor) -> list[Tensor]:
    return [rows.reshape(N, 1, D, 1).clone(), torch.ones(1, 1, 1, 1)]


@pytest.mark.parametrize("name", ["exact_sgd", "exact_adagrad", "exact_row_wise_adagrad", "adam"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("mean", [False, True])
def test_steps_match(name: str, weight_decay: float, mean: bool) -> None:
    pooling = common.PoolingMode.MEAN if mean else common.PoolingMode.SUM
    optimizer = Optimizer(name, learning_rate=0.1, eps=1e-3, weight_decay=weight_decay)
    torch.manual_seed(0)
    try:
        theirs = tbe.SplitTableBatchedEmbeddingBagsCodegen(
            [(N, D, common.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU)],
            optimizer=embedding_configs.EmbOptimType(name),
            learning_rate=optimizer.learning_rate,
            eps=optimizer.eps,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            weight_decay=optimizer.weight_decay,
            pooling_mode=pooling,
        )
    except (AssertionError, NotImplementedError) as error:
        pytest.skip(f"FBGEMM has no {name} on the CPU: {error}")
    weights = theirs.split_embedding_weights()[0]
    weights.copy_(torch.randn(N, D))
    cores = dense_as_tensor_train(weights)
    states = optimizer_states(optimizer, cores)
    for iteration in range(1, 4):
        lengths = torch.tensor([3, 0, 1, 2, 4, 2])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        indices = torch.randint(0, N, (int(offsets[-1]),))
        indices[:4] = 5  # duplicates
        grad = torch.randn(B, D)
        theirs(indices, offsets).backward(grad)
        bags = Bags(indices, offsets, None, [2], [N], [0], int(mean))
        cores[1].fill_(1.0)  # the step moved it
        update(Call(cores, bags), states, optimizer, grad, iteration)
        torch.testing.assert_close(cores[0].reshape(N, D), weights, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_gradient_clipping_matches(weighted: bool) -> None:
    torch.manual_seed(1)
    theirs = tbe.SplitTableBatchedEmbeddingBagsCodegen(
        [(N, D, common.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU)],
        optimizer=embedding_configs.EmbOptimType.EXACT_SGD,
        learning_rate=0.1,
        gradient_clipping=True,
        max_gradient=0.3,
    )
    weights = theirs.split_embedding_weights()[0]
    weights.copy_(torch.randn(N, D))
    cores = [core.requires_grad_() for core in dense_as_tensor_train(weights)]
    lookup = BatchedLookup([2], [N], [0], 0, torch.float32)
    update = FusedUpdate(
        "exact_sgd",
        torch.tensor(0.1),
        torch.tensor(0),
        gradient_clipping=True,
        max_gradient=0.3,
    )
    indices, offsets = torch.tensor([5, 1, 5, 0, 9]), torch.tensor([0, 2, 2, 3, 4, 5, 5])
    factors = torch.randn(5) if weighted else None
    own, their = (factors.clone().requires_grad_() if weighted else None for _ in range(2))
    grad = torch.randn(B, D)
    assert (grad.abs() > 0.3).any()
    theirs(indices, offsets, per_sample_weights=their).backward(grad)
    fused_lookup(lookup, update, indices, offsets, own, cores).backward(grad)
    torch.testing.assert_close(cores[0].detach().reshape(N, D), weights, rtol=2e-6, atol=2e-6)
    if weighted:
        torch.testing.assert_close(own.grad, their.grad, rtol=2e-6, atol=2e-6)
