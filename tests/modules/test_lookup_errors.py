"""Errors of lookups name the table, and in batched ones the feature too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchrec_flowtt.modules import (
    FlowTTEmbedding,
    FlowTTEmbeddingBag,
    TableBatchedFlowTTEmbeddingBags,
)
from torchrec_flowtt.shapes import TTSpec

ADS = TTSpec(22, 8, (2, 3, 4), (2, 2, 2), (4, 5), name="ads")
USERS = TTSpec(300, 8, (17, 18), (2, 4), (3,), name="users")
FEATURES = {"ad": "ads", "user": "users", "ad_seen": "ads", "friend": "users"}
# Two bags of two rows a feature.
OFFSETS = torch.arange(0, 17, 2)
INDICES = torch.arange(16)


def tables(names: bool = True, **kwargs: Any) -> TableBatchedFlowTTEmbeddingBags:
    return TableBatchedFlowTTEmbeddingBags(
        [ADS, USERS],
        feature_table_map=[["ads", "users"].index(table) for table in FEATURES.values()],
        feature_names=list(FEATURES) if names else None,
        **kwargs,
    )


def changed(tensor: Tensor, position: int, value: int) -> Tensor:
    tensor = tensor.clone()
    tensor[position] = value
    return tensor


def quoted(error: pytest.ExceptionInfo[Exception]) -> set[str]:
    """Which of all names are in the message."""
    names = {*FEATURES, *FEATURES.values()}
    return {name for name in names if repr(name) in str(error.value)}


@pytest.mark.parametrize("pooling_mode", ["sum", "none"])
@pytest.mark.parametrize("optimizer", ["exact_sgd", "none"])
@pytest.mark.parametrize("value", [-1, 300])
@pytest.mark.parametrize("feature", range(4))
def test_an_index_names_its_feature_and_table(
    feature: int, value: int, optimizer: str, pooling_mode: str
) -> None:
    module = tables(optimizer=optimizer, pooling_mode=pooling_mode)
    name, table = list(FEATURES.items())[feature]
    with pytest.raises(IndexError, match=f"got {value}; feature {feature} is '{name}', ") as error:
        module(changed(INDICES, 4 * feature + 3, value), OFFSETS)
    assert quoted(error) == {name, table}


@pytest.mark.parametrize("feature", range(4))
def test_an_offset_names_its_feature_and_table(feature: int) -> None:
    name, table = list(FEATURES.items())[feature]
    with pytest.raises(ValueError, match="offsets") as error:
        tables()(INDICES, changed(OFFSETS, 2 * feature + 1, 100))
    assert quoted(error) == {name, table}
    with pytest.raises(ValueError, match="offsets") as error:
        tables()(INDICES, changed(OFFSETS, 2 * feature + 1, int(OFFSETS[2 * feature + 2]) + 1))
    assert quoted(error) == {name, table}


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ((INDICES.float(), OFFSETS), TypeError),
        ((INDICES, OFFSETS.float()), TypeError),
        ((INDICES, OFFSETS[:-1]), ValueError),
        ((INDICES, OFFSETS + 1), ValueError),
        ((INDICES, OFFSETS, INDICES), TypeError),
        ((INDICES, OFFSETS, torch.ones(3)), ValueError),
    ],
)
def test_what_concerns_all_features_names_all(
    arguments: tuple[Tensor, ...], kind: type[Exception]
) -> None:
    with pytest.raises(kind) as error:
        tables()(*arguments)
    assert quoted(error) == {*FEATURES, *FEATURES.values()}


def test_features_without_names() -> None:
    with pytest.raises(IndexError, match=r"got 22; table 0 is 'ads'$") as error:
        tables(names=False)(changed(INDICES, 0, 22), OFFSETS)
    assert quoted(error) == {"ads"}
    nameless = TableBatchedFlowTTEmbeddingBags([TTSpec.suggest(100, 8, tt_ranks=2)])
    with pytest.raises(IndexError, match=r"got 100$"):
        nameless(torch.tensor([100]), torch.tensor([0, 1]))


def test_many_features_are_not_all_listed() -> None:
    names = [f"f{i}" for i in range(20)]
    module = TableBatchedFlowTTEmbeddingBags([ADS], feature_table_map=[0] * 20, feature_names=names)
    with pytest.raises(TypeError, match=r"features 'f0', .*'f7' and 12 more, tables 'ads'$"):
        module(torch.ones(20), torch.arange(21))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((INDICES + 7, OFFSETS[:-1]), IndexError, r"indices\[15\]: expected 0 to 21 \(it has 22"),
        ((INDICES - 1, OFFSETS[:-1]), IndexError, r"indices\[0\]: expected 0 to 21 \(it has 22"),
        ((INDICES.float(), OFFSETS[:-1]), TypeError, "indices must be int32 or int64"),
        ((INDICES,), ValueError, "offsets must be a 1-D tensor"),
        ((INDICES, changed(OFFSETS, 1, 99)), ValueError, r"offsets\[1\].* got 99 \(bag 1\)"),
        ((INDICES, OFFSETS, INDICES), TypeError, "per_sample_weights must have a floating"),
        ((INDICES, OFFSETS, torch.ones(2)), ValueError, "per_sample_weights must have the shape"),
    ],
)
def test_bags_of_one_table(
    arguments: tuple[Tensor, ...], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"^TT table 'ads': {message}"):
        FlowTTEmbeddingBag(ADS)(*arguments)


@pytest.mark.parametrize(
    ("indices", "kind", "message"),
    [
        (INDICES + 7, IndexError, r"indices\[15\]: expected 0 to 21 \(it has 22 rows\), got 22"),
        (INDICES.float(), TypeError, "indices must be int32 or int64"),
        ([1], TypeError, "indices must be a Tensor, got list"),
    ],
)
def test_rows_of_one_table(indices: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^TT table 'ads': {message}"):
        FlowTTEmbedding(ADS)(indices)


def test_one_table_without_a_name() -> None:
    nameless = TTSpec(22, 8, (2, 3, 4), (2, 2, 2), (4, 5))
    with pytest.raises(IndexError, match=r"^indices\[15\]"):
        FlowTTEmbedding(nameless)(INDICES + 7)
