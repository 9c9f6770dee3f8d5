"""Row-wise Adagrad of replicated tables against FBGEMM's fused one."""

from __future__ import annotations

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from torchrec_flowtt.train.slice_adagrad import SliceAdagrad


def test_five_steps_equal_fbgemm_s_fused_steps():
    torch.manual_seed(0)
    fused = SplitTableBatchedEmbeddingBagsCodegen(
        [(6, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.1,
        eps=1e-8,
    )
    weight = torch.rand(6, 4)
    fused.split_embedding_weights()[0].copy_(weight)
    replica = torch.nn.Parameter(weight.clone())
    optimizer = SliceAdagrad([replica], lr=0.1, eps=1e-8)
    offsets = torch.tensor([0, 2, 2, 5])
    for step in range(5):
        indices = torch.tensor([0, 3, 5, 5, step % 3])
        grad = torch.rand(3, 4)
        fused(indices, offsets).backward(grad)
        optimizer.zero_grad()
        torch.nn.functional.embedding_bag(
            indices, replica, offsets, mode="sum", include_last_offset=True
        ).backward(grad)
        optimizer.step()
    torch.testing.assert_close(replica.data, fused.split_embedding_weights()[0])
    momentum = fused.split_optimizer_states()[0][0]
    torch.testing.assert_close(optimizer.state[replica]["momentum1"], momentum)


def test_a_core_s_slices_are_its_rows_and_untouched_ones_do_not_decay():
    core = torch.nn.Parameter(torch.ones(3, 2, 2, 2))
    core.grad = torch.zeros(3, 2, 2, 2)
    core.grad[1, 0, 0, 0] = 8.0
    optimizer = SliceAdagrad([core], lr=1.0, eps=1e-8, weight_decay=1.0)
    optimizer.step()
    assert torch.equal(core.data[0], torch.ones(2, 2, 2))
    # Gradient 9 in one element and 1 in seven: the mean of squares is 88 / 8.
    assert optimizer.state[core]["momentum1"].tolist() == [0.0, 11.0, 0.0]
    step = 1.0 / 11.0**0.5
    torch.testing.assert_close(core.data[1].flatten()[0], torch.tensor(1.0 - 9.0 * step))
    torch.testing.assert_close(core.data[1].flatten()[1:], torch.full((7,), 1.0 - step))
