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


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> TableBatchedFlowTTEmbeddingBags:
    """Tables that keep packed cores, which small lookups would have no use for."""
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", "tiled")
    tables = make_tables(OptimType.EXACT_SGD).cuda()
    tables.keep_packed_cores()
    return tables


def test_kept_packed_cores_follow_the_steps(tiled: TableBatchedFlowTTEmbeddingBags) -> None:
    plain = copy.deepcopy(tiled)
    plain.keep_packed_cores(False)
    for step in range(3):
        batch = tuple(tensor.cuda() for tensor in make_batch(step))
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(tiled(*batch), plain(*batch), rtol=1e-5, atol=1e-5)
        for model in (tiled, plain):
            model(*batch).square().sum().backward()
    assert tiled._packed_cores is not None and tiled._packed_cores.nbytes > 0
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            tiled(*batch)
            tiled.refresh_packed_cores()
            tiled(*batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    tiled.cpu()
    assert tiled._packed_cores.nbytes == 0


def test_a_graph_reads_the_kept_copy(tiled: TableBatchedFlowTTEmbeddingBags) -> None:
    indices, offsets, _ = (tensor.cuda() for tensor in make_batch(0))

    def expected() -> Tensor:
        plain = copy.deepcopy(tiled)
        plain.keep_packed_cores(False)
        return plain(indices, offsets)

    def change() -> None:
        for core in tiled.tt_cores:
            core.mul_(1.5)

    def captured() -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = tiled(indices, offsets)
        return graph, output

    with torch.no_grad():
        before = tiled(indices, offsets).clone()
        graph, output = captured()
        change()
        graph.replay()
        torch.testing.assert_close(output, before, rtol=1e-5, atol=1e-5)
        tiled.refresh_packed_cores()
        graph.replay()
        torch.testing.assert_close(output, expected(), rtol=1e-5, atol=1e-5)
        change()
        tiled(indices, offsets)
        graph.replay()
        torch.testing.assert_close(output, expected(), rtol=1e-5, atol=1e-5)
        # Captured while the copy is out of date: the packing is in the graph.
        change()
        graph, output = captured()
        for _ in range(2):
            change()
            graph.replay()
            torch.testing.assert_close(output, expected(), rtol=1e-5, atol=1e-5)


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
