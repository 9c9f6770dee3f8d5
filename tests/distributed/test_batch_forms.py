"""Batches in forms that an unsharded collection takes, and a sharded one alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.bad_batches import KEYS, TABLES, assert_says, batch
from tests.distributed.sharded_models import variable_batch
from torchrec_flowtt.distributed import FlowTTEmbeddingBagCollection
from torchrec_flowtt.distributed.batch_forms import for_exchange, for_lookup

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
BY_TABLES = {
    "all": TABLES,
    "TT": [table for table in TABLES if table.tt],
    "uncompressed": [table for table in TABLES if not table.tt],
}


def collection(tables: str = "all", weighted: bool = False) -> FlowTTEmbeddingBagCollection:
    configs = [table.config() for table in BY_TABLES[tables]]
    return FlowTTEmbeddingBagCollection(configs, is_weighted=weighted)


def empty_batch(form: str, dtype: torch.dtype, weighted: bool) -> KeyedJaggedTensor:
    empty = torch.empty(0, dtype=dtype)
    forms = {
        "lengths": {"lengths": empty},
        "lengths and stride": {"lengths": empty, "stride": 0},
        "offsets": {"offsets": torch.zeros(1, dtype=dtype)},
        "offsets and stride": {"offsets": torch.zeros(1, dtype=dtype), "stride": 0},
        "variable": {"lengths": empty, "stride_per_key_per_rank": [[0]] * len(KEYS)},
    }
    return KeyedJaggedTensor(
        KEYS, values=empty, weights=torch.empty(0) if weighted else None, **forms[form]
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    "form", ["lengths", "lengths and stride", "offsets", "offsets and stride", "variable"]
)
@pytest.mark.parametrize("tables", BY_TABLES)
def test_batches_of_0_samples(tables: str, form: str, dtype: torch.dtype, weighted: bool) -> None:
    ebc = collection(tables, weighted)
    output = ebc(empty_batch(form, dtype, weighted))
    features = batch(weighted)
    assert output.keys() == ebc(features).keys()
    assert output.length_per_key() == ebc(features).length_per_key()
    assert output.values().shape == (0, ebc(features).values().shape[1])
    output.values().sum().backward()
    assert all(not p.grad.any() for p in ebc.parameters())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tables", BY_TABLES)
def test_weights_of_any_dtype(tables: str, dtype: torch.dtype) -> None:
    # One half is exact in all of them.
    ebc = collection(tables, weighted=True)
    weights = torch.full((batch().values().numel(),), 0.5)
    expected = ebc(batch(weights=weights)).values()
    actual = ebc(batch(weights=weights.to(dtype))).values()
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_gradients_reach_weights_of_any_dtype(data_type: DataType, dtype: torch.dtype) -> None:
    config = EmbeddingBagConfig(
        name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"], data_type=data_type
    )
    ebc = FlowTTEmbeddingBagCollection([config], is_weighted=True)
    weights = torch.ones(3, dtype=dtype, requires_grad=True)
    features = KeyedJaggedTensor(
        ["f"], torch.tensor([1, 2, 3]), weights, lengths=torch.tensor([1, 2])
    )
    ebc(features).values().sum().backward()
    rows = ebc.embedding_bags["t"].weight.detach()[1:4]
    torch.testing.assert_close(weights.grad.float(), rows.float().sum(1), rtol=1e-2, atol=1e-2)


def test_weights_are_not_used_where_none_are_asked_for() -> None:
    ebc = collection()
    expected = ebc(batch()).values()
    with pytest.warns(UserWarning, match="not used") as caught:
        assert torch.equal(ebc(batch(weighted=True)).values(), expected)
    assert_says(caught[0].message, ("'shared'", "'tt_dp'", "'fb'", "is_weighted=False"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(ebc(batch(weighted=True)).values(), expected)


def test_weights_that_are_not_used_may_be_anything() -> None:
    ebc = collection()
    for weights in (torch.ones(3), torch.arange(100)):
        assert torch.equal(ebc(batch(weights=weights)).values(), ebc(batch()).values())


@pytest.mark.parametrize("prepare", [for_lookup, for_exchange])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_variable_batches_keep_their_bags(prepare: Callable, is_weighted: bool) -> None:
    features, _ = variable_batch(TABLES, rank=0, step=0)
    weights = torch.rand(features.values().numel(), dtype=torch.float64)
    weighted = KeyedJaggedTensor(
        features.keys(),
        features.values(),
        weights,
        features.lengths(),
        stride_per_key_per_rank=features.stride_per_key_per_rank(),
        inverse_indices=features.inverse_indices(),
    )
    prepared = prepare(weighted, is_weighted)
    assert (prepared.weights_or_none() is not None) == is_weighted
    assert prepared.keys() == features.keys()
    assert prepared.values() is features.values()
    assert prepared.lengths() is features.lengths()
    assert prepared.stride_per_key_per_rank() == features.stride_per_key_per_rank()
    assert prepared.inverse_indices() is weighted.inverse_indices()
    assert prepared.stride() == features.stride()


def test_batches_that_need_no_other_form_are_passed_on() -> None:
    for weighted in (False, True):
        features = batch(weighted)
        assert for_lookup(features, weighted) is features
        assert for_exchange(features, weighted) is features
