"""Row-wise Adagrad of replicated tables against FBGEMM's fused one."""

from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from torchrec_flowtt.modules import RowWiseAdagrad


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
    optimizer = RowWiseAdagrad([replica], lr=0.1, eps=1e-8)
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
    torch.testing.assert_close(optimizer.state[replica]["sum"], momentum)


def test_a_core_s_slices_are_its_rows_and_untouched_ones_do_not_decay():
    core = torch.nn.Parameter(torch.ones(3, 2, 2, 2))
    core.grad = torch.zeros(3, 2, 2, 2)
    core.grad[1, 0, 0, 0] = 8.0
    optimizer = RowWiseAdagrad([core], lr=1.0, eps=1e-8, weight_decay=1.0)
    optimizer.step()
    assert torch.equal(core.data[0], torch.ones(2, 2, 2))
    # Gradient 9 in one element and 1 in seven: the mean of squares is 88 / 8.
    assert optimizer.state[core]["sum"].tolist() == [0.0, 11.0, 0.0]
    step = 1.0 / 11.0**0.5
    torch.testing.assert_close(core.data[1].flatten()[0], torch.tensor(1.0 - 9.0 * step))
    torch.testing.assert_close(core.data[1].flatten()[1:], torch.full((7,), 1.0 - step))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_resumed_optimizer_goes_on_alike(dtype):
    """Sums are wider than float16 cores: 3e5 is no float16."""

    def two(steps, core, state=None):
        core = torch.nn.Parameter(core.clone())
        optimizer = RowWiseAdagrad([core], lr=0.1)
        if state is not None:
            optimizer.load_state_dict(state)
        for step in steps:
            core.grad = torch.full_like(core, 300.0 * (step + 1))
            optimizer.step()
        return core.data, optimizer

    start = torch.ones(2, 1, 2, 2, dtype=dtype)
    middle, optimizer = two(range(2), start)
    total = optimizer.state_dict()["state"][0]["sum"]
    assert total.tolist() == [450000.0, 450000.0]
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected, _ = two(range(2, 4), middle, optimizer.state_dict())
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(expected, two(range(4), start)[0], rtol=0, atol=0)


@pytest.mark.parametrize("argument", ["lr", "eps", "weight_decay"])
def test_hyper_parameters_are_checked(argument):
    with pytest.raises(ValueError, match=f"{argument} must be finite and at least 0, got -1"):
        RowWiseAdagrad([torch.nn.Parameter(torch.ones(2))], **{"lr": 0.1, argument: -1})


@pytest.mark.parametrize("gradient", [0.0, 1e-30])
def test_rows_that_no_gradient_has_reached_stay_without_an_eps(gradient):
    p = torch.nn.Parameter(torch.ones(2, 3))
    p.grad = torch.tensor([[1.0, 1.0, 1.0], [gradient] * 3])  # 1e-60 is no float32
    RowWiseAdagrad([p], lr=0.5, eps=0.0).step()
    assert p.tolist() == [[0.5] * 3, [1.0] * 3]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "lr must be finite and at least 0, got -1.0"),
        ({"eps": float("nan")}, ValueError, "eps must be finite"),
        ({"weight_decay": float("inf")}, ValueError, "weight_decay must be finite"),
        ({"lr": "x"}, TypeError, "lr must be a number, got str"),
    ],
)
def test_settings_are_checked_wherever_they_are_given(settings, error, message):
    p = torch.nn.Parameter(torch.ones(2, 3))
    with pytest.raises(error, match=message):
        RowWiseAdagrad([p], **settings)
    with pytest.raises(error, match=message):
        RowWiseAdagrad([{"params": [p], **settings}])
    optimizer = RowWiseAdagrad([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": [p], **settings})
    assert len(optimizer.param_groups) == 1


def test_parameters_that_have_no_rows_or_none_of_them():
    with pytest.raises(ValueError, match="at least one dimension, got a scalar"):
        RowWiseAdagrad([torch.nn.Parameter(torch.tensor(1.0))])
    empty = torch.nn.Parameter(torch.ones(0, 3))
    empty.grad = torch.ones(0, 3)
    RowWiseAdagrad([empty], weight_decay=0.1).step()
    p = torch.nn.Parameter(torch.ones(2, 3))
    p.grad = torch.ones(2, 3).to_sparse()
    with pytest.raises(RuntimeError, match="needs dense gradients, got torch.sparse_coo"):
        RowWiseAdagrad([p]).step()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (torch.optim.Adam, "expected 'step' and 'sum', got .*exp_avg"),
        (torch.optim.Adagrad, r"sum must have shape \(2,\), one number a row, got \(2, 3\)"),
    ],
)
def test_states_of_other_optimizers_are_refused(other, message):
    p = torch.nn.Parameter(torch.ones(2, 3))
    p.grad = torch.ones(2, 3)
    theirs = other([p])
    theirs.step()
    ours = RowWiseAdagrad([p])
    with pytest.raises(ValueError, match=message):
        ours.load_state_dict(theirs.state_dict())
    assert not ours.state
