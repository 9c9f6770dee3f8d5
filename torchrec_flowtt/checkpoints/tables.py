"""Conversions of single tables of a checkpoint; every other entry is copied."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchrec_flowtt.checkpoints.files import State, check_target, joined, read_state, write_state
from torchrec_flowtt.decomposition import cores_from_tt_rec, decompose, reconstruct
from torchrec_flowtt.shapes import TTSpec
from torchrec_flowtt.shapes.arguments import quoted_names

__all__ = [
    "ConvertedTable",
    "Outcome",
    "decompose_checkpoint",
    "import_tt_rec",
    "reconstruct_checkpoint",
]

# Tables of an EmbeddingBagCollection, and of an EmbeddingCollection.
_TABLES = r"(?:^|[./])(?:embedding_bags|embeddings)\."
_WEIGHT = re.compile(_TABLES + r"(?P<table>[^/]+)\.weight$")
_CORE = re.compile(_TABLES + r"(?P<table>[^/]+)\.tt_cores\.(?P<core>\d+)$")
_OPTIMIZER_STATE = re.compile(_TABLES + r"(?P<table>[^/]+?)\.(?:weight|tt_cores\.\d+)[./]")


@dataclass(frozen=True)
class ConvertedTable:
    """What became of one table.

    Attributes:
        table: its name.
        key: the weight's name in the checkpoint, ``...embedding_bags.<table>.weight`` or
            ``...embeddings.<table>.weight``, of which the cores' names differ in ``tt_cores.<k>``
            for ``weight``.
        spec: its TT shape.
        relative_error: of a decomposition, see
            :class:`~torchrec_flowtt.decomposition.TTDecomposition`; else 0.
        largest_error: likewise.
    """

    table: str
    key: str
    spec: TTSpec
    relative_error: float = 0.0
    largest_error: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """What a conversion did.

    Attributes:
        tables: the tables converted.
        dropped: names of the entries that the new checkpoint lacks: the optimizer's state of the
            tables converted, which has no meaning for their new parameters.
    """

    tables: tuple[ConvertedTable, ...]
    dropped: tuple[str, ...]


def decompose_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    tables: Mapping[str, Mapping[str, Any]],
    dtype: torch.dtype | None = None,
) -> Outcome:
    """Replaces weights of uncompressed tables by TT-cores.

    Args:
        source: checkpoint, a folder of torch.distributed.checkpoint or a file of ``torch.save``.
        target: checkpoint to write; a file if it ends in ``.pt`` or ``.pth``, else a folder.
        tables: for each table the arguments of :meth:`~torchrec_flowtt.shapes.TTSpec.suggest` but
            its size, such as ``{"ads": {"tt_ranks": 32}}``.
        dtype: dtype of the cores; default the weight's.

    Raises:
        OSError: a checkpoint cannot be read or written.
        TypeError: an argument of a shape has the wrong type.
        ValueError: a table is not in the checkpoint, or cannot have the shape.
    """

    def convert(path: tuple[Any, ...], table: str, weight: Tensor) -> tuple[State, ConvertedTable]:
        if not _is_plain(weight) or weight.dim() != 2:
            raise ValueError(f"{joined(path)} must be a dense tensor [N, D], got {_kind(weight)}")
        spec = TTSpec.suggest(weight.shape[0], weight.shape[1], name=table, **tables[table])
        found = decompose(weight, spec, dtype=dtype)
        converted = ConvertedTable(
            table, joined(path), spec, found.relative_error, found.largest_error
        )
        return _core_entries(path, found.cores), converted

    def find(state: State) -> dict[tuple[Any, ...], tuple[str, Any]]:
        matches = {path: _WEIGHT.search(joined(path)) for path in state}
        return {
            path: (match["table"], state[path])
            for path, match in matches.items()
            if match is not None
        }

    return _converted(Path(source), Path(target), list(tables), "weight", find, convert)


def reconstruct_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    num_embeddings: Mapping[str, int],
    dtype: torch.dtype | None = None,
) -> Outcome:
    """Replaces TT-cores by the weights of the uncompressed tables that they stand for.

    Args:
        source: checkpoint, a folder of torch.distributed.checkpoint or a file of ``torch.save``.
        target: checkpoint to write; a file if it ends in ``.pt`` or ``.pth``, else a folder.
        num_embeddings: for each table N, which the cores do not tell.
        dtype: dtype of the weights; default the cores'.

    Raises:
        OSError: a checkpoint cannot be read or written.
        TypeError: a dtype is none that a table may have.
        ValueError: a table is not in the checkpoint, one of its cores is missing, they have fewer
            rows, or a row does not fit `dtype`.
    """

    def convert(path: tuple[Any, ...], table: str, cores: Any) -> tuple[State, ConvertedTable]:
        for k in range(max(cores) + 1):
            if k not in cores:
                raise ValueError(
                    f"table {table!r}: core {k} is missing, the checkpoint has cores "
                    f"{sorted(cores)}"
                )
            if not _is_plain(cores[k]):
                raise ValueError(
                    f"table {table!r}: core {k} must be a dense tensor, got {_kind(cores[k])}"
                )
        ordered = [cores[k] for k in sorted(cores)]
        weight = reconstruct(ordered, num_embeddings[table], dtype)
        spec = _spec(ordered, weight.shape[0], table)
        return {path: weight}, ConvertedTable(table, joined(path), spec)

    def find(state: State) -> dict[tuple[Any, ...], tuple[str, Any]]:
        found: dict[tuple[Any, ...], tuple[str, Any]] = {}
        for path, value in state.items():
            match = _CORE.search(joined(path))
            if match is not None:
                name = str(path[-1])[: -len(f"tt_cores.{match['core']}")] + "weight"
                cores = found.setdefault((*path[:-1], name), (match["table"], {}))[1]
                cores[int(match["core"])] = value
        return found

    tables = list(num_embeddings)
    return _converted(Path(source), Path(target), tables, "tt_cores", find, convert)


def import_tt_rec(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    table: str,
    tt_ranks: Sequence[int],
    num_embeddings: int,
    *,
    source_table: int = 0,
    source_prefix: str = "",
    prefix: str = "",
    ignore_cache: bool = False,
) -> Outcome:
    """Writes the cores of a module of TT-Rec under the names that a table has here.

    Args:
        source: file of ``torch.save`` with the state dict of a model that has the module.
        target: checkpoint to write; a file if it ends in ``.pt`` or ``.pth``, else a folder. It has
            the entries ``<prefix>embedding_bags.<table>.tt_cores.<k>`` and no other.
        table: the table's name here.
        tt_ranks: the module's argument ``tt_ranks``.
        num_embeddings: the module's argument of this name.
        source_table: which of the module's tables.
        source_prefix: what precedes ``tt_cores.0`` in the name of the module's first core.
        prefix: what precedes ``embedding_bags`` in the target, such as ``"model.sparse."``.
        ignore_cache: take the cores of a module whose cache holds rows. Such rows were trained in
            the cache, so the cores do not have what they learned.

    Raises:
        OSError: a checkpoint cannot be read or written.
        TypeError: an argument has the wrong type.
        ValueError: there are no such cores, they do not fit the ranks, or the cache holds rows.
    """
    check_target(Path(target))
    state = {joined(path): value for path, value in read_state(Path(source)).items()}
    cores: list[Tensor] = []
    while (key := f"{source_prefix}tt_cores.{len(cores)}") in state:
        if not _is_plain(state[key]):
            raise ValueError(f"{source}: {key} must be a dense tensor, got {_kind(state[key])}")
        cores.append(state[key])
    if not cores:
        raise ValueError(f"{source} has no {source_prefix}tt_cores.0")
    cached = state.get(f"{source_prefix}cache_state")
    if cached is not None and not _is_plain(cached):
        raise ValueError(f"{source}: cache_state must be a dense tensor, got {_kind(cached)}")
    if cached is not None and bool((cached >= 0).any()) and not ignore_cache:
        raise ValueError(
            f"{source}: rows of {source_prefix}tt_cores are in the module's cache, which has "
            "trained them apart from the cores; ignore_cache takes the cores without them"
        )
    ours = cores_from_tt_rec(cores, tt_ranks, table=source_table, num_embeddings=num_embeddings)
    path = (f"{prefix}embedding_bags.{table}.weight",)
    write_state(Path(target), _core_entries(path, ours))
    converted = ConvertedTable(table, joined(path), _spec(ours, num_embeddings, table))
    return Outcome((converted,), ())


def _converted(
    source: Path,
    target: Path,
    tables: Sequence[str],
    what: str,
    find: Callable[[State], dict[tuple[Any, ...], tuple[str, Any]]],
    convert: Callable[[tuple[Any, ...], str, Any], tuple[State, ConvertedTable]],
) -> Outcome:
    check_target(target)
    state = read_state(source)
    found = find(state)
    present = sorted({table for table, _ in found.values()})
    missing = [table for table in tables if table not in present]
    if missing:
        raise ValueError(
            f"{source} has no {what} of {quoted_names(missing)} under embedding_bags or "
            f"embeddings; it has those of {quoted_names(present) if present else 'no table'}"
        )
    converted, entries = [], dict[tuple[Any, ...], Any]()
    for path, (table, value) in found.items():
        if table in tables:
            new, report = convert(path, table, value)
            entries |= new
            converted.append(report)
    dropped = []
    for path, value in state.items():
        name = joined(path)
        match = _OPTIMIZER_STATE.search(name)
        parameter = (_WEIGHT if what == "weight" else _CORE).search(name)
        if parameter is not None and parameter["table"] in tables:
            continue
        if match is not None and match["table"] in tables:
            dropped.append(name)
        else:
            entries[path] = value
    write_state(target, entries)
    return Outcome(tuple(converted), tuple(dropped))


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    where = " on meta" if value.is_meta else ""
    return f"{value.dtype} of shape {tuple(value.shape)}, {value.layout}{where}"


def _core_entries(path: tuple[Any, ...], cores: Sequence[Tensor]) -> State:
    name = str(path[-1]).removesuffix("weight")
    return {(*path[:-1], f"{name}tt_cores.{k}"): core for k, core in enumerate(cores)}


def _spec(cores: Sequence[Tensor], num_embeddings: int, table: str) -> TTSpec:
    p, _, q, ranks = zip(*(core.shape for core in cores), strict=True)
    columns = 1
    for factor in q:
        columns *= factor
    return TTSpec(num_embeddings, columns, p, q, ranks[:-1], name=table)
