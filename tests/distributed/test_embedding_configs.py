from __future__ import annotations

import copy
import dataclasses
import warnings

import pytest
import torch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_flowtt.distributed import FlowTTEmbeddingBagConfig


def config(**changes: object) -> FlowTTEmbeddingBagConfig:
    fields: dict = {
        "name": "ads",
        "num_embeddings": 1000,
        "embedding_dim": 16,
        "feature_names": ["ad_id"],
        "tt_ranks": (8, 4),
    }
    return FlowTTEmbeddingBagConfig(**{**fields, **changes})


def test_is_a_config_of_torchrec() -> None:
    made = config(pooling=PoolingType.MEAN)
    assert isinstance(made, EmbeddingBagConfig)
    assert (made.name, made.num_embeddings, made.embedding_dim) == ("ads", 1000, 16)
    assert made.pooling is PoolingType.MEAN


def test_resolves_the_tt_shape() -> None:
    made = config()
    assert made.num_cores == 3
    assert made.tt_spec.tt_ranks == (8, 4)
    assert made.tt_spec.num_embeddings == 1000
    assert made.tt_spec.name == "ads"


@pytest.mark.parametrize(
    ("given", "ranks", "cores"),
    [
        ({"tt_ranks": 5}, (5, 5), 3),
        ({"tt_ranks": 5, "num_cores": 4}, (5, 5, 5), 4),
        ({"tt_ranks": (7,)}, (7,), 2),
        ({"tt_ranks": 3, "p_shapes": (40, 30)}, (3,), 2),
        ({"tt_ranks": 3, "q_shapes": (2, 2, 2, 2)}, (3, 3, 3), 4),
    ],
)
def test_number_of_cores_follows_what_is_given(
    given: dict, ranks: tuple[int, ...], cores: int
) -> None:
    made = config(**given)
    assert made.tt_spec.tt_ranks == ranks
    assert made.num_cores == cores == made.tt_spec.num_cores


def test_keeps_the_factors_given() -> None:
    made = config(p_shapes=(11, 10, 10), q_shapes=(1, 4, 4))
    assert made.tt_spec.p_shapes == (11, 10, 10)
    assert made.tt_spec.q_shapes == (1, 4, 4)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"tt_ranks": None}, ("ads", "tt_ranks")),
        ({"p_shapes": (9, 10, 10)}, ("ads", "p_shapes", "1000", "900")),
        ({"q_shapes": (2, 2, 2)}, ("ads", "q_shapes", "16")),
        ({"p_shapes": (100, 10), "num_cores": 3}, ("ads", "p_shapes", "3")),
        ({"tt_ranks": (0, 4)}, ("ads", "tt_ranks")),
        ({"num_cores": 5, "tt_ranks": 4}, ("ads", "num_cores", "5")),
        ({"data_type": DataType.INT8}, ("ads", "data_type", "INT8")),
        ({"pooling": PoolingType.NONE}, ("ads", "pooling")),
        ({"init_fn": torch.nn.init.zeros_}, ("ads", "init_fn", "weight_init_min")),
        ({"use_virtual_table": True}, ("ads", "use_virtual_table")),
        ({"weight_init_min": 0.1, "weight_init_max": 0.1}, ("ads", "weight_init_min", "0.1")),
        ({"weight_init_min": 0.2, "weight_init_max": 0.1}, ("ads", "weight_init_max", "0.2")),
        ({"num_embeddings_post_pruning": 10}, ("ads", "num_embeddings_post_pruning")),
        ({"feature_names": "ad_id"}, ("ads", "feature_names", "list of strings", "'ad_id'")),
        ({"feature_names": ["ad_id", 3]}, ("ads", "feature_names", "list of strings", "3")),
    ],
)
def test_refuses_what_a_tt_table_cannot_be(changes: dict, parts: tuple[str, ...]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        config(**changes)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("argument", ["num_embeddings", "embedding_dim"])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, None, "10"])
def test_impossible_sizes_are_called_that(argument: str, value: object) -> None:
    with pytest.raises((ValueError, TypeError), match=f"'ads': {argument} must be") as caught:
        config(**{argument: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "ranks", [0, -1, 2.5, True, "32", (), (8,), (8, 4, 2, 1), (0, 4), (8, 2.5), (8, None)]
)
def test_impossible_ranks_are_called_as_they_were_given(ranks: object) -> None:
    with pytest.raises((ValueError, TypeError), match=r"'ads': tt_ranks\b"):
        config(tt_ranks=ranks, num_cores=3)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        # Three cores of 10 x 2, 10 x 2, 10 x 4 for 1000 x 16.
        ({"tt_ranks": (20, 40)}, ("(20, 40)", "save nothing", "18000", "16000", "(20, 40)")),
        ({"tt_ranks": (21, 1)}, ("(21, 1)", "higher", "(20, 40)")),
        ({"tt_ranks": (1, 41)}, ("(1, 41)", "higher", "(20, 40)")),
        ({"tt_ranks": 10**6}, ("(1000000, 1000000)", "20000060000000", "16000", "(20, 40)")),
        # Two cores of 4 x 2, 4 x 4 of rank 8 for 16 x 8.
        ({"tt_ranks": (8,), "num_embeddings": 16, "embedding_dim": 8}, ("(8,)", "192", "128")),
    ],
)
def test_wasteful_ranks_are_warned_of(changes: dict, parts: tuple[str, ...]) -> None:
    with pytest.warns(UserWarning, match="'ads'") as caught:
        config(**changes)
    assert len(caught) == 1
    for part in parts:
        assert part in str(caught[0].message)


@pytest.mark.parametrize(
    "changes", [{"tt_ranks": (20, 30)}, {"tt_ranks": (1,)}, {"tt_ranks": (12, 40)}]
)
def test_useful_ranks_are_not_warned_of(changes: dict) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config(**changes)


def test_init_variance_is_that_of_the_uniform_range() -> None:
    assert config().init_variance == pytest.approx(1 / 3000)
    assert config(weight_init_min=-0.5, weight_init_max=1.0).init_variance == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("data_type", "dtype"),
    [
        (DataType.FP32, torch.float32),
        (DataType.FP16, torch.float16),
        (DataType.BF16, torch.bfloat16),
    ],
)
def test_dtype(data_type: DataType, dtype: torch.dtype) -> None:
    assert config(data_type=data_type).dtype is dtype


def test_copies_and_replacements() -> None:
    made = config()
    assert copy.deepcopy(made).tt_spec == made.tt_spec
    assert dataclasses.replace(made, name="other").tt_spec.name == "other"


def test_a_plain_collection_refuses_it() -> None:
    with pytest.raises(TypeError, match="'ads'.*FlowTTEmbeddingBagCollection"):
        EmbeddingBagCollection(tables=[config()])
