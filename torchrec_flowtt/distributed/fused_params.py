"""TorchRec's ``fused_params`` of a TT table, as typed and checked values."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.modules.embedding_configs import DataType, data_type_to_dtype

from torchrec_flowtt.modules import OptimizerConfig, OptimType
from torchrec_flowtt.shapes import TTSpec

# Hyper-parameters that mean nothing without the feature they tune, with the value that leaves it
# off; anything else would be ignored silently, so it is refused.
_OFF: dict[str, tuple[Any, ...]] = {
    "weight_decay_mode": (0, "none"),
    "weight_norm_coefficient": (0, 0.0),
    "lower_bound": (0, 0.0),
    "regularization_mode": (0, "none"),
    "lr_decay": (0, 0.0),
    "max_norm": (0, 0.0),
    "initial_accumulator_value": (0, 0.0),
    "momentum": (0, 0.0),
    "dampening": (0, 0.0),
    "nesterov": (False,),
    "amsgrad": (False,),
    "maximize": (False,),
    "use_rowwise_bias_correction": (False,),
    "enable_raw_embedding_streaming": (False,),
}

# Where rows are cached, how they are checked or batched, how a step is launched: no effect on
# what a TT table computes.
_WITHOUT_EFFECT = frozenset(
    {
        "bounds_check_mode",
        "cache_algorithm",
        "cache_load_factor",
        "cache_precision",
        "cache_reserved_memory",
        "capturable",
        "counter_halflife",
        "differentiable",
        "enforce_hbm",
        "foreach",
        "fused",
        "gather_uvm_cache_stats",
        "learning_rate_power",
        "multipass_prefetch_config",
        "prefetch_pipeline",
        "record_cache_metrics",
        "ssd_table_list",
        "use_one_tbe_per_table",
        "uvm_host_mapped",
        "weights_precision",
        "_batch_key",
    }
)

_TRAINED = (
    OptimType.EXACT_SGD,
    OptimType.EXACT_ADAGRAD,
    OptimType.EXACT_ROWWISE_ADAGRAD,
    OptimType.ADAM,
)

_OUTPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class FusedOptimizerParams:
    """The optimizer that steps inside the backward pass of a TT table.

    Names, values and defaults are those of FBGEMM's table-batched embeddings, so one
    ``fused_params`` dictionary serves TT and uncompressed tables.

    Attributes:
        config: the optimizer and its hyper-parameters.
        output_dtype: dtype of the pooled embeddings.
    """

    config: OptimizerConfig = OptimizerConfig()
    output_dtype: torch.dtype = torch.float32

    @classmethod
    def from_fused_params(
        cls, fused_params: Mapping[str, Any] | None, table: str
    ) -> FusedOptimizerParams:
        """Read the parameters of `table` from TorchRec's dictionary.

        Args:
            fused_params: ``optimizer`` (FBGEMM's ``EmbOptimType`` or its value), ``learning_rate``
                or ``lr``, ``eps``, ``beta1``, ``beta2`` or ``betas``, ``weight_decay``,
                ``gradient_clipping``, ``max_gradient``, ``stochastic_rounding``, ``output_dtype``;
                caching and bounds-check settings have no effect on a TT table.
            table: name of the table, for messages.

        Raises:
            ValueError: if the optimizer or a value is not available for TT tables, or a parameter
                would be ignored although it changes the result.
        """
        values: dict[str, Any] = {}
        output_dtype = torch.float32
        for name, value in (fused_params or {}).items():
            if name == "optimizer":
                values["optimizer"] = _optimizer(value, table)
            elif name in ("learning_rate", "lr"):
                values["learning_rate"] = _number(name, value, table)
            elif name == "betas":
                if not isinstance(value, Sequence) or len(value) != 2:
                    raise ValueError(
                        f"TT table {table!r}: fused_params['betas'] must be two numbers, "
                        f"got {value!r}"
                    )
                values["beta1"] = _number("betas[0]", value[0], table)
                values["beta2"] = _number("betas[1]", value[1], table)
            elif name in ("eps", "beta1", "beta2", "weight_decay", "max_gradient"):
                values[name] = _number(name, value, table)
            elif name in ("gradient_clipping", "stochastic_rounding"):
                values[name] = value
            elif name == "output_dtype":
                output_dtype = _output_dtype(value, table)
            elif name in _OFF:
                if value is not None and _plain(value) not in _OFF[name]:
                    raise ValueError(
                        f"TT table {table!r}: fused_params[{name!r}]={value!r} is not supported "
                        f"for TT tables; leave it out (off is {_OFF[name][0]!r})"
                    )
            elif name not in _WITHOUT_EFFECT:
                raise ValueError(
                    f"TT table {table!r}: fused_params[{name!r}] is unknown to TT tables. They "
                    "take optimizer, learning_rate, eps, beta1, beta2, weight_decay, "
                    "gradient_clipping, max_gradient, stochastic_rounding and output_dtype."
                )
        try:
            config = OptimizerConfig(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"TT table {table!r}: fused_params: {error}") from None
        return cls(config, output_dtype)

    def state_bytes(self, spec: TTSpec) -> int:
        """Bytes of optimizer state of a table: float32 values a core element or a core slice."""
        if self.config.optimizer is OptimType.EXACT_ROWWISE_ADAGRAD:
            return 4 * sum(spec.p_shapes)
        return 4 * spec.num_parameters * self.config.optimizer.num_moments


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def _optimizer(value: Any, table: str) -> OptimType:
    plain = _plain(value)
    for optimizer in _TRAINED:
        if plain == optimizer.value:
            return optimizer
    raise ValueError(
        f"TT table {table!r}: the fused optimizer {plain!r} is not available for TT tables, "
        f"which have {', '.join(o.value for o in _TRAINED)}"
    )


def _number(name: str, value: Any, table: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"TT table {table!r}: fused_params[{name!r}] must be a finite number, got {value!r}"
        )
    return number


def _output_dtype(value: Any, table: str) -> torch.dtype:
    if isinstance(value, DataType):
        dtype = data_type_to_dtype(value)
    elif isinstance(value, torch.dtype):
        dtype = value
    elif hasattr(value, "as_dtype"):  # FBGEMM's SparseType
        dtype = value.as_dtype()
    else:
        dtype = None
    if dtype not in _OUTPUT_DTYPES:
        raise ValueError(
            f"TT table {table!r}: output_dtype must be FP32, FP16 or BF16, got {value!r}"
        )
    result: torch.dtype = dtype
    return result
