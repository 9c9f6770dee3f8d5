from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.modules.embedding_configs import DataType

from torchrec_flowtt.distributed.fused_params import FusedOptimizerParams
from torchrec_flowtt.modules import OptimizerConfig, OptimType
from torchrec_flowtt.shapes import TTSpec

read = FusedOptimizerParams.from_fused_params


def test_defaults_are_fbgemms() -> None:
    params = read(None, "t")
    assert params.config == OptimizerConfig(
        OptimType.EXACT_SGD, 0.01, eps=1e-8, beta1=0.9, beta2=0.999, weight_decay=0.0
    )
    assert params.output_dtype is torch.float32


def test_all_values() -> None:
    params = read(
        {
            "optimizer": EmbOptimType.ADAM,
            "learning_rate": 0.5,
            "eps": 1e-3,
            "beta1": 0.8,
            "beta2": 0.9,
            "weight_decay": 0.1,
            "output_dtype": SparseType.FP16,
        },
        "t",
    )
    assert params.config == OptimizerConfig(OptimType.ADAM, 0.5, 1e-3, 0.8, 0.9, 0.1)
    assert params.output_dtype is torch.float16


def test_names_of_torch_optimizers() -> None:
    config = read({"optimizer": "adam", "lr": 0.2, "betas": (0.7, 0.8)}, "t").config
    assert (config.learning_rate, config.beta1, config.beta2) == (0.2, 0.7, 0.8)
    assert read({"lr_decay": 0, "initial_accumulator_value": 0.0, "foreach": None}, "t")


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (SparseType.BF16, torch.bfloat16),
        (DataType.FP16, torch.float16),
        (torch.float32, torch.float32),
    ],
)
def test_output_dtypes(value: object, dtype: torch.dtype) -> None:
    assert read({"output_dtype": value}, "t").output_dtype is dtype


def test_settings_of_caches_and_checks_have_no_effect() -> None:
    ignored = {
        "bounds_check_mode": BoundsCheckMode.NONE,
        "cache_load_factor": 0.2,
        "cache_precision": SparseType.FP16,
        "prefetch_pipeline": True,
    }
    assert read(ignored, "t") == read({}, "t")


@pytest.mark.parametrize(
    ("params", "parts"),
    [
        ({"optimizer": EmbOptimType.LAMB}, ("lamb", "exact_sgd")),
        ({"optimizer": OptimType.NONE}, ("none", "adam")),
        ({"gradient_clipping": 1}, ("gradient_clipping", "True or False", "1")),
        ({"stochastic_rounding": "no"}, ("stochastic_rounding", "'no'")),
        ({"max_gradient": -1.0}, ("max_gradient", "-1.0")),
        ({"lr_decay": 0.1}, ("lr_decay", "0.1")),
        ({"max_norm": 1.0}, ("max_norm", "1.0")),
        ({"betas": 0.9}, ("betas", "0.9")),
        ({"output_dtype": "fp32"}, ("output_dtype", "fp32")),
        ({"learning_rat": 0.1}, ("learning_rat", "learning_rate")),
        ({"learning_rate": "high"}, ("learning_rate", "high")),
        ({"learning_rate": float("nan")}, ("learning_rate", "nan")),
        ({"learning_rate": -1.0}, ("learning_rate", "-1.0")),
        ({"optimizer": "adam", "beta1": 1.5}, ("beta1", "1.5")),
        ({"optimizer": "exact_adagrad", "weight_decay": 0.1}, ("weight_decay", "0.1")),
        ({"output_dtype": SparseType.INT8}, ("output_dtype", "INT8")),
    ],
)
def test_refuses_what_would_be_ignored(params: dict, parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="'clicks'") as caught:
        read(params, "clicks")
    for part in parts:
        assert part in str(caught.value)


def test_clipping_and_rounding() -> None:
    params = {"gradient_clipping": True, "max_gradient": 0.25, "stochastic_rounding": False}
    config = read(params, "t").config
    assert (config.gradient_clipping, config.max_gradient) == (True, 0.25)
    assert not config.stochastic_rounding
    assert read({}, "t").config.stochastic_rounding  # as in FBGEMM


@pytest.mark.parametrize(
    ("optimizer", "values"),
    [
        (OptimType.EXACT_SGD, lambda spec: 0),
        (OptimType.EXACT_ADAGRAD, lambda spec: spec.num_parameters),
        (OptimType.EXACT_ROWWISE_ADAGRAD, lambda spec: sum(spec.p_shapes)),
        (OptimType.ADAM, lambda spec: 2 * spec.num_parameters),
    ],
)
def test_state_bytes(optimizer: OptimType, values) -> None:
    spec = TTSpec.suggest(1000, 16, tt_ranks=8)
    assert read({"optimizer": optimizer}, "t").state_bytes(spec) == 4 * values(spec)
