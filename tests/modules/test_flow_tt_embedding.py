from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from torchrec_flowtt.modules import (
    FlowTTEmbedding,
    FlowTTEmbeddingBag,
    PoolingMode,
    TableBatchedFlowTTEmbeddingBags,
)
from torchrec_flowtt.shapes import TTSpec

SPEC = TTSpec(22, 12, (2, 3, 4), (2, 3, 2), (4, 5), name="ads")


def test_takes_the_place_of_embedding() -> None:
    torch.manual_seed(0)
    embedding = FlowTTEmbedding(SPEC, dtype=torch.float64)
    plain = nn.Embedding.from_pretrained(embedding.to_dense().detach())
    indices = torch.tensor([[3, 21, 3], [0, 7, 3]])
    torch.testing.assert_close(embedding(indices), plain(indices))
    torch.testing.assert_close(embedding(indices)[1, 1], embedding.row(7))
    assert (embedding.num_embeddings, embedding.embedding_dim) == (22, 12)


def test_trains_with_a_torch_optimizer() -> None:
    embedding = FlowTTEmbedding(SPEC, init_variance=0.1)
    optimizer = torch.optim.Adam(embedding.parameters(), lr=0.05)
    indices = torch.arange(22)
    target = torch.zeros(22, 12)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (embedding(indices) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_state_copy_dtype_and_repr() -> None:
    embedding = FlowTTEmbedding(1000, 16, tt_ranks=4, output_dtype=torch.float16, name="x")
    assert list(embedding.state_dict()) == ["tt_cores.0", "tt_cores.1", "tt_cores.2"]
    assert "mode" not in embedding.extra_repr() and "compression" in embedding.extra_repr()
    indices = torch.tensor([1, 2])
    assert embedding(indices).dtype == torch.float16
    twin = copy.deepcopy(embedding)
    assert torch.equal(twin(indices), embedding(indices))
    assert twin.double()(indices).dtype == torch.float64
    meta = FlowTTEmbedding.from_spec(embedding.spec, device="meta")
    assert isinstance(meta, FlowTTEmbedding) and meta.tt_cores[0].is_meta
    bag = FlowTTEmbeddingBag.from_spec(SPEC, mode="sum")
    assert isinstance(bag, FlowTTEmbeddingBag)


def test_errors() -> None:
    with pytest.raises(ValueError, match="pooling mode .* for bags, got 'none'"):
        FlowTTEmbeddingBag(SPEC, mode="none")
    with pytest.raises(IndexError, match="expected 0 to 21"):
        FlowTTEmbedding(SPEC)(torch.tensor(22))
    with pytest.raises(TypeError, match="tt_ranks must be given"):
        FlowTTEmbedding(10, 4)
    with pytest.raises(TypeError, match="dtype must be one of"):
        FlowTTEmbedding(SPEC, dtype=torch.int64)


@pytest.mark.parametrize("kind", [FlowTTEmbedding, FlowTTEmbeddingBag])
@pytest.mark.parametrize("name", ["ads", ""])
def test_an_index_out_of_range_names_the_table(
    kind: type[FlowTTEmbedding | FlowTTEmbeddingBag], name: str
) -> None:
    table = kind.from_spec(dataclasses.replace(SPEC, name=name))
    prefix = r"^TT table 'ads': " if name else "^"
    for index in (22, -1, 2**40):
        with pytest.raises(IndexError, match=prefix + rf"indices\[1\].* got {index}"):
            table(torch.tensor([[3, index]]))


@pytest.mark.parametrize("optimizer", ["none", "exact_sgd"])
def test_table_batched_without_pooling(optimizer: str) -> None:
    other = TTSpec(30, 12, (5, 6), (4, 3), (3,))
    tables = TableBatchedFlowTTEmbeddingBags(
        [SPEC, other],
        feature_table_map=[0, 1, 0],
        pooling_mode=PoolingMode.NONE,
        optimizer=optimizer,
        weights_precision=torch.float64,
    )
    indices = torch.tensor([21, 0, 29, 4, 4])
    offsets = torch.tensor([0, 1, 2, 3, 3, 4, 5])
    first, second = (FlowTTEmbedding(spec, dtype=torch.float64) for spec in (SPEC, other))
    for single, cores in zip((first, second), tables.split_tt_cores(), strict=True):
        for parameter, core in zip(single.tt_cores, cores, strict=True):
            parameter.data.copy_(core)
    output = tables(indices, offsets)
    expected = torch.cat([first(indices[:2]), second(indices[2:3]), first(indices[3:])])
    torch.testing.assert_close(output, expected)
    before = tables.tt_cores[0].detach().clone()
    output.square().sum().backward()
    if optimizer == "none":
        expected.square().sum().backward()
        torch.testing.assert_close(tables.tt_cores[0].grad, first.tt_cores[0].grad)
    else:
        assert tables.iter.item() == 1 and not torch.equal(before, tables.tt_cores[0])
    with pytest.raises(ValueError, match="per_sample_weights must be None without pooling"):
        tables(indices, offsets, torch.ones(5))
