"""In which precision TT-cores and embeddings are served."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrec_flowtt.shapes.arguments import quoted_names

__all__ = ["SERVED_DTYPES", "converted_core", "core_dtype", "output_dtype"]

#: What TT-cores and embeddings may consist of.
SERVED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NAMES = ", ".join(str(dtype) for dtype in SERVED_DTYPES)


def core_dtype(qconfig: Any, table: str, trained: torch.dtype) -> torch.dtype:
    """The dtype of a table's TT-cores under TorchRec's ``QuantConfig``, or one of torch.

    Args:
        qconfig: the request.
        table: name of the table.
        trained: dtype of the cores so far.

    Returns:
        That of ``per_table_weight_dtype``; else that for all tables, if it is one of float32,
        float16 and bfloat16; else `trained`, or float32 instead of float64.

    Raises:
        ValueError: the table's own dtype is none of these.
    """
    own = (getattr(qconfig, "per_table_weight_dtype", None) or {}).get(table)
    if own is not None:
        if own not in SERVED_DTYPES:
            raise ValueError(
                f"TT table {table!r}: per_table_weight_dtype must be one of {_NAMES}, got {own}"
            )
        return own  # type: ignore[no-any-return]
    of_all = qconfig.weight().dtype
    if of_all in SERVED_DTYPES:
        return of_all  # type: ignore[no-any-return]
    return trained if trained in SERVED_DTYPES else torch.float32


def output_dtype(qconfig: Any, tables: list[str]) -> torch.dtype:
    """The dtype of embeddings.

    Raises:
        TypeError: it is an integer, which only uncompressed tables can be pooled to.
    """
    dtype: torch.dtype = qconfig.activation().dtype
    if tables and dtype not in SERVED_DTYPES:
        raise TypeError(
            f"TT tables {quoted_names(tables)}: output_dtype must be one of {_NAMES}, got {dtype}"
        )
    return dtype


def converted_core(core: Tensor, dtype: torch.dtype, table: str, number: int) -> Tensor:
    """A copy of a TT-core in `dtype`.

    Args:
        core: of any floating dtype, on any device.
        dtype: that of the copy.
        table: name of the table, for messages.
        number: k of the core, for messages.

    Raises:
        ValueError: the core's largest element is outside the normal range of float16, if that is
            `dtype`. Waits for the device then.
    """
    converted = core.detach().to(dtype, copy=True)
    if dtype == torch.float16 and not core.is_meta:
        limits = torch.finfo(torch.float16)
        largest = core.detach().abs().max().item()
        if largest != 0 and not limits.smallest_normal <= largest <= limits.max:
            raise ValueError(
                f"TT table {table!r}: the largest element of core {number} must be "
                f"{limits.smallest_normal:.2g} to {limits.max:.0f} for torch.float16, got "
                f"{largest:.3g}; use bfloat16 or float32"
            )
    return converted
