"""Which optimizers FBGEMM fuses into the backward pass of uncompressed tables on the CPU."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from torchrec_flowtt.shapes.arguments import quoted_names

_AVAILABLE = ("EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD", "EMAINPLACE_ROWWISE_ADAGRAD")
_FUSED = EmbeddingComputeKernel.FUSED.value


def refuse_optimizers_without_cpu_kernel(infos: Iterable[EmbeddingShardingInfo]) -> None:
    """Checks the fused optimizers of uncompressed tables that are to be on the CPU.

    FBGEMM checks them too, but by an assertion that names no table, on the tables' ranks only.

    Args:
        infos: tables of one sharding type, those of all ranks. Others than uncompressed ones with
            the fused kernel are passed over.

    Raises:
        ValueError: an optimizer has no kernel there.
    """
    available = [EmbOptimType[n] for n in _AVAILABLE if n in EmbOptimType.__members__]
    tables: dict[Any, list[str]] = {}
    for info in infos:
        if info.param_sharding.compute_kernel == _FUSED:
            optimizer = (info.fused_params or {}).get("optimizer", EmbOptimType.EXACT_SGD)
            if optimizer not in available:
                tables.setdefault(optimizer, []).append(info.embedding_config.name)
    for optimizer, names in tables.items():
        value = optimizer.value if isinstance(optimizer, enum.Enum) else optimizer
        raise ValueError(
            f"uncompressed tables {quoted_names(names)}: FBGEMM has no fused optimizer {value!r} "
            f"on the CPU, only {', '.join(repr(o.value) for o in available)}; use one of these, or "
            "shard the tables data_parallel and give them a torch optimizer"
        )
