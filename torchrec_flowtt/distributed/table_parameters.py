"""How a TT table's shape travels through TorchRec: as an attribute of its parameter.

TorchRec describes a table to planners and sharders by one two-dimensional parameter. For a TT
table that parameter lives on the meta device, so it has the table's shape and no memory; the TT
shape and the optimizer set by ``apply_optimizer_in_backward`` ride on it as attributes, the way
TorchRec itself carries ``_optimizer_classes``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from torchrec_flowtt.distributed.embedding_configs import TTTableConfig
from torchrec_flowtt.shapes import TTSpec

_SPEC = "_flowtt_spec"
_OPTIMIZER_ATTRIBUTES = ("_in_backward_optimizers", "_optimizer_classes", "_optimizer_kwargs")


def tt_spec_of(parameter: torch.Tensor) -> TTSpec | None:
    """The TT shape that `parameter` stands for, ``None`` if it is an ordinary table."""
    return cast("TTSpec | None", getattr(parameter, _SPEC, None))


def tt_table_parameter(config: TTTableConfig, cores: Sequence[torch.Tensor]) -> nn.Parameter:
    """A meta parameter ``[num_embeddings, embedding_dim]`` that stands for a TT table.

    Args:
        config: the table.
        cores: its TT-cores, from which optimizer attributes are taken.

    Raises:
        ValueError: if the cores of the table were given different in-backward optimizers.
    """
    parameter = nn.Parameter(
        torch.empty(config.num_embeddings, config.embedding_dim, dtype=config.dtype, device="meta")
    )
    setattr(parameter, _SPEC, config.tt_spec)
    first = cores[0]
    for core in cores[1:]:
        for name in _OPTIMIZER_ATTRIBUTES[1:]:
            if getattr(core, name, None) != getattr(first, name, None):
                raise ValueError(
                    f"table {config.name!r}: its TT-cores have different in-backward optimizers "
                    f"({name}: {getattr(first, name, None)} and {getattr(core, name, None)}); "
                    "apply one optimizer to all cores of a table"
                )
    for name in _OPTIMIZER_ATTRIBUTES:
        if hasattr(first, name):
            value = list(getattr(first, name))
            # TorchRec rewrites the keyword arguments in place while it builds the fused ones.
            setattr(parameter, name, [dict(v) if isinstance(v, dict) else v for v in value])
    return parameter
