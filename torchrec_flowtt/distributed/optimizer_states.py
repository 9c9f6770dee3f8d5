"""Optimizer state of TT tables between table-wise and data-parallel checkpoints.

A table-wise TT table has the state of its fused optimizer, a data-parallel one that of a torch
optimizer over the cores. Both hold the same numbers under other names::

    table-wise                                  data-parallel
    <table>.momentum1                           Adagrad: sum      Adam: exp_avg
    <table>.momentum2                                             Adam: exp_avg_sq
    <table>.iter, int64 [1]                     step, float32 []; nothing for SGD

The data-parallel ones are those of ``torch.optim.Adagrad``, ``Adam`` and ``AdamW``; the counterpart
of row-wise Adagrad is :class:`torchrec_flowtt.modules.RowWiseAdagrad`, whose ``sum`` has one number
a core slice, as ``momentum1`` has. So a checkpoint of the one can be loaded into the other once the
state dict that is loaded into uses the names that were saved.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchrec.distributed.types import ShardedTensor

from torchrec_flowtt.shapes.arguments import quoted_names

# Tables of an EmbeddingBagCollection, and of an EmbeddingCollection.
_TABLES = r"(?:^|\.)(?:embedding_bags|embeddings)\."
_CORE_KEY = re.compile(_TABLES + r"(?P<table>.+)\.tt_cores\.\d+$")
_WEIGHT_KEY = re.compile(_TABLES + r"(?P<table>.+)\.weight$")
_FIRST = ("sum", "exp_avg")
_SECOND = "exp_avg_sq"


@contextlib.contextmanager
def saved_in_other_sharding(
    optimizer_state: dict[str, Any], tt_tables: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Load the optimizer state of TT tables that were sharded the other way when it was saved.

    Uncompressed tables are not covered: their optimizer state loads into the sharding it was saved
    in only.

    Inside the ``with`` block, the entries of `tt_tables` have the names and shapes of the other
    sharding: of data-parallel ones if they are table-wise now, and the reverse. The tensors are
    those of the optimizer, so what is loaded into them is in place; at the end the names are put
    back, the step counts included.

    Args:
        optimizer_state: state dict of a TorchRec ``KeyedOptimizer``, changed in place. Dense
            optimizers must have their state already (``init_state()``).
        tt_tables: names of the TT tables that changed their sharding.

    Raises:
        KeyError: if the state has no entry of a table.
        ValueError: if a table is uncompressed, or its optimizer has no counterpart.

    Example::

        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        with saved_in_other_sharding(state["optimizer"], tt_tables=["ads"]):
            dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    """
    entries = _entries(optimizer_state, tt_tables)
    renamed = {key: _renamed(key, table, optimizer_state) for key, table in entries.items()}
    originals = {key: optimizer_state["state"][key] for key in entries}
    state = optimizer_state["state"]
    for key, entry in renamed.items():
        if entry is None:
            del state[key]
        else:
            state[key] = entry
    try:
        yield optimizer_state
    finally:
        state.update(originals)
    for key, table in entries.items():
        loaded = renamed[key]
        if loaded is not None:
            _copy_steps(loaded, originals[key], table)


def _entries(optimizer_state: dict[str, Any], tables: Collection[str]) -> dict[str, str]:
    found = {key: _CORE_KEY.search(key) for key in optimizer_state["state"]}
    entries = {key: match["table"] for key, match in found.items() if match is not None}
    uncompressed = {match["table"] for match in map(_WEIGHT_KEY.search, found) if match is not None}
    wrong = sorted(uncompressed & set(tables))
    if wrong:
        raise ValueError(
            f"tt_tables must name TT tables, got the uncompressed {quoted_names(wrong)}: their "
            "optimizer state loads into the sharding it was saved in only"
        )
    missing = sorted(set(tables) - set(entries.values()))
    # No entry of any TT table: they train data-parallel with SGD, which has no state.
    if missing and entries:
        raise KeyError(
            f"the optimizer state has no entries of the TT tables {missing}, "
            f"only of {sorted(set(entries.values()))}"
        )
    return {key: table for key, table in entries.items() if table in tables}


def _renamed(key: str, table: str, optimizer_state: dict[str, Any]) -> dict[str, Any] | None:
    """The entry as the other sharding saved it; None if that sharding saves none."""
    entry = optimizer_state["state"][key]
    if f"{table}.iter" in entry:
        return _as_data_parallel(table, entry)
    return _as_table_wise(key, table, entry)


def _as_data_parallel(table: str, entry: dict[str, Any]) -> dict[str, Any] | None:
    if set(entry) == {f"{table}.iter"}:
        return None  # SGD
    renamed: dict[str, Any] = {"step": torch.zeros(())}
    first, second = entry.get(f"{table}.momentum1"), entry.get(f"{table}.momentum2")
    if first is not None:
        renamed["exp_avg" if second is not None else "sum"] = first
    if second is not None:
        renamed[_SECOND] = second
    return renamed


def _as_table_wise(key: str, table: str, entry: dict[str, Any]) -> dict[str, Any]:
    unknown = sorted(set(entry) - {"step", *_FIRST, _SECOND})
    if unknown or "step" not in entry:
        raise ValueError(
            f"{key}: expected the state of torch.optim.Adagrad, Adam or AdamW, or of "
            f"torchrec_flowtt.modules.RowWiseAdagrad, got {sorted(entry)}"
        )
    renamed: dict[str, Any] = {f"{table}.iter": torch.zeros(1, dtype=torch.int64)}
    for name in _FIRST:
        if name in entry:
            renamed[f"{table}.momentum1"] = entry[name]
    if _SECOND in entry:
        renamed[f"{table}.momentum2"] = entry[_SECOND]
    return renamed


def _copy_steps(loaded: dict[str, Any], entry: dict[str, Any], table: str) -> None:
    if "step" in loaded:
        for local in _local_tensors(entry[f"{table}.iter"]):
            local.fill_(int(loaded["step"].item()))
    else:
        entry["step"].fill_(float(loaded[f"{table}.iter"].item()))


def _local_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    if isinstance(value, DTensor):
        wrapper: Any = value.to_local()
        return list(wrapper.local_shards())
    return [value]
