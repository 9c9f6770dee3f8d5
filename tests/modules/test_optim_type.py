"""Names, defaults and checks of the fused optimizers."""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
import pickle
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from torchrec_flowtt.modules import OptimizerConfig, OptimType


def test_values_are_those_of_fbgemm() -> None:
    configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    names = {
        OptimType.EXACT_SGD: "EXACT_SGD",
        OptimType.EXACT_ADAGRAD: "EXACT_ADAGRAD",
        OptimType.EXACT_ROWWISE_ADAGRAD: "EXACT_ROWWISE_ADAGRAD",
        OptimType.ADAM: "ADAM",
        OptimType.NONE: "NONE",
    }
    assert set(names) == set(OptimType)
    for ours, name in names.items():
        theirs = configs.EmbOptimType[name]
        assert ours.value == theirs.value
        assert OptimType(theirs) is ours
        assert OptimType(ours.value) is ours
        assert str(ours) == str(theirs)
    with pytest.raises(ValueError, match="optimizer must be one of .* got 'lamb'"):
        OptimType(configs.EmbOptimType.LAMB)


def test_defaults_are_those_of_fbgemm() -> None:
    training = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    theirs = inspect.signature(training.SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters
    for field in dataclasses.fields(OptimizerConfig):
        default = theirs[field.name].default
        assert field.default == (OptimType(default) if field.name == "optimizer" else default)


class Foreign(enum.Enum):
    """An enum of another library with one known and one unknown value."""

    ADAM = "adam"
    LION = "lion"


def test_unknown_optimizers_list_the_valid_ones() -> None:
    assert OptimType(Foreign.ADAM) is OptimType.ADAM
    for unknown in ("lion", Foreign.LION, "ADAM", 3, None):
        with pytest.raises(ValueError) as caught:
            OptimType(unknown)
        for member in OptimType:
            assert repr(member.value) in str(caught.value)


def test_survives_pickle_and_deepcopy() -> None:
    config = OptimizerConfig("adam", learning_rate=1, weight_decay=0.1)  # type: ignore[arg-type]
    assert config.optimizer is OptimType.ADAM
    assert isinstance(config.learning_rate, float)
    for restored in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert restored == config
        assert restored.optimizer is OptimType.ADAM


@pytest.mark.parametrize(
    "value", [np.float32(0.25), np.float64(0.25), Fraction(1, 4), np.int64(2), 2]
)
def test_real_numbers_of_any_type(value: Any) -> None:
    config = OptimizerConfig("adam", learning_rate=value)
    assert type(config.learning_rate) is float and config.learning_rate == float(value)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"optimizer": "rmsprop"}, ValueError, "optimizer must be one of"),
        ({"learning_rate": -0.1}, ValueError, r"learning_rate must be finite .* got -0\.1"),
        ({"learning_rate": float("nan")}, ValueError, "learning_rate must be finite .* got nan"),
        ({"learning_rate": float("inf")}, ValueError, "learning_rate must be finite .* got inf"),
        ({"learning_rate": "0.1"}, TypeError, r"learning_rate must be a real number, got '0\.1'"),
        ({"learning_rate": np.bool_(True)}, TypeError, "learning_rate must be a real number"),
        ({"learning_rate": 1j}, TypeError, "learning_rate must be a real number, got 1j"),
        ({"eps": True}, TypeError, "eps must be a real number, got True"),
        ({"beta1": 1.0}, ValueError, r"beta1 must be in \[0, 1\), got 1\.0"),
        ({"beta2": -0.5}, ValueError, r"beta2 must be in \[0, 1\), got -0\.5"),
        ({"weight_decay": -1e-3}, ValueError, "weight_decay must be finite"),
        (
            {"optimizer": "exact_sgd", "weight_decay": 0.1},
            ValueError,
            "weight_decay must be 0 for optimizer 'exact_sgd'",
        ),
    ],
)
def test_errors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        OptimizerConfig(**changes)
