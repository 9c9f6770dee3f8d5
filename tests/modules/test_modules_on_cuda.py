"""The modules on a GPU do what they do on the CPU, without waiting for the device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from torchrec_flowtt.modules import (
    FlowTTEmbeddingBag,
    OptimType,
    TableBatchedFlowTTEmbeddingBags,
    second_moment,
)
from torchrec_flowtt.shapes import TTSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

ADS = TTSpec(22, 12, (2, 3, 4), (2, 3, 2), (4, 5), name="ads")
USERS = TTSpec(300, 8, (17, 18), (2, 4), (3,), name="users")
# Three features (ads, users, ads) of two bags each.
FEATURES = [0, 1, 0]
OFFSETS = torch.tensor([0, 2, 2, 3, 5, 6, 8])


def make_batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Indices, offsets and weights on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randint(0, 22, (8,), generator=generator)
    return indices, OFFSETS, torch.rand(8, generator=generator)


def make_tables(optimizer: OptimType) -> TableBatchedFlowTTEmbeddingBags:
    """Two tables on the CPU with entries of order one."""
    torch.manual_seed(0)
    return TableBatchedFlowTTEmbeddingBags(
        [ADS, USERS],
        feature_table_map=FEATURES,
        optimizer=optimizer,
        learning_rate=0.05,
        eps=1e-3,
        init_variances=[1.0, 1.0],
    )


@pytest.mark.parametrize("optimizer", list(OptimType))
def test_training_matches_the_cpu(optimizer: OptimType) -> None:
    on_cpu = make_tables(optimizer)
    on_cuda = copy.deepcopy(on_cpu).cuda()
    for step in range(3):
        batch = make_batch(step)
        cuda_batch = tuple(tensor.cuda() for tensor in batch)
        for weights in (batch[2], cuda_batch[2]):
            weights.requires_grad_()
        output, expected = on_cuda(*cuda_batch), on_cpu(*batch)
        torch.testing.assert_close(output.cpu(), expected, rtol=1e-4, atol=1e-4)
        output.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(cuda_batch[2].grad.cpu(), batch[2].grad, rtol=1e-3, atol=1e-3)
    assert len(list(on_cuda.buffers())) == len(list(on_cpu.buffers()))
    for a, b in zip(on_cuda.state_dict().values(), on_cpu.state_dict().values(), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-3)
    for a, b in zip(on_cuda.tt_cores, on_cpu.tt_cores, strict=True):
        if optimizer is OptimType.NONE:
            torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-3, atol=1e-3)
        else:
            assert a.grad is None


@pytest.mark.parametrize("optimizer", list(OptimType))
def test_a_step_never_waits_for_the_device(optimizer: OptimType) -> None:
    tables = make_tables(optimizer).cuda()
    bag = FlowTTEmbeddingBag(ADS, device="cuda")
    indices, offsets, weights = (tensor.cuda() for tensor in make_batch(0))
    tables(indices, offsets, weights).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tables(indices, offsets, weights).sum().backward()
        if optimizer is not OptimType.NONE:
            tables.set_learning_rate(0.1)
        bag(indices, offsets[:3], weights).sum().backward()
        bag(indices.reshape(2, 4)).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_step_follows_the_learning_rate() -> None:
    tables = make_tables(OptimType.EXACT_ADAGRAD).cuda()
    eager = copy.deepcopy(tables)
    indices, offsets, _ = (tensor.cuda() for tensor in make_batch(0))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        tables(indices, offsets).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tables(indices, offsets).sum().backward()
    eager(indices, offsets).sum().backward()
    for rate in (0.05, 0.2):
        for model in (tables, eager):
            model.set_learning_rate(rate)
        graph.replay()
        eager(indices, offsets).sum().backward()
    assert tables.iter.item() == eager.iter.item() == 3
    for a, b in zip(tables.state_dict().values(), eager.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_autocast_and_initialisation() -> None:
    bag = FlowTTEmbeddingBag(ADS, device="cuda")
    assert second_moment(list(bag.tt_cores)) == pytest.approx(1 / 66, rel=1e-5)
    indices = torch.tensor([[3, 21]], device="cuda")
    expected = bag(indices)
    with torch.autocast("cuda", dtype=torch.float16):
        assert torch.equal(bag(indices), expected)
        assert torch.allclose(bag.to_dense()[indices].mean(1), expected, atol=1e-5)
    bag.reset_parameters(torch.Generator("cuda").manual_seed(0))
    assert bag.row(21).device.type == "cuda"
    with pytest.raises(ValueError, match="indices must be on the device of the TT-cores, cuda:0"):
        bag(indices.cpu())
