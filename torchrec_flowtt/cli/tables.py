"""The commands that convert tables of a checkpoint: decompose, reconstruct, import-tt-rec."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from torchrec_flowtt.checkpoints import (
    Outcome,
    decompose_checkpoint,
    reconstruct_checkpoint,
)
from torchrec_flowtt.checkpoints import import_tt_rec as import_checkpoint
from torchrec_flowtt.config import CheckpointError

DTYPES = ("float32", "float16", "bfloat16")


def _integers(context: click.Context, option: click.Parameter, text: str | None) -> Any:
    """Parses "4,8,4"."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} must be integers with commas between them") from None


# Options for several integers.
INTEGERS: dict[str, Any] = {"metavar": "N,N,..", "callback": _integers}


def _paths(command: Callable[..., Any]) -> Callable[..., Any]:
    existing = click.Path(exists=True, path_type=Path)
    command = click.argument("target", type=click.Path(path_type=Path))(command)
    return click.argument("source", type=existing)(command)


def _reported(convert: Callable[[], Outcome], target: Path) -> None:
    try:
        outcome = convert()
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(str(error)) from None
    for table in outcome.tables:
        spec = table.spec
        shape = f"p_shapes {spec.p_shapes}, q_shapes {spec.q_shapes}, tt_ranks {spec.tt_ranks}"
        click.echo(
            f"{table.key}: {spec.num_embeddings} x {spec.embedding_dim}, {shape}, "
            f"{spec.compression_ratio:.1f} times smaller as cores"
        )
        if table.relative_error:
            click.echo(
                f"  relative error {table.relative_error:.3e}, largest {table.largest_error:.3e}"
            )
    if outcome.dropped:
        click.echo(f"left out: {len(outcome.dropped)} entries of the optimizer for these tables")
    click.echo(f"written: {target}")


@click.command("decompose")
@_paths
@click.option("--table", "tables", multiple=True, required=True, help="A table; may be repeated.")
@click.option("--tt-ranks", **INTEGERS, help="One rank for all inner bonds, or one for each.")
@click.option("--max-bytes", type=int, help="In place of ranks: bytes that the cores may have.")
@click.option("--num-cores", type=int, help="2 to 4; by default what the others imply, else 3.")
@click.option("--p-shapes", **INTEGERS, help="Row factors; balanced ones if left out.")
@click.option("--q-shapes", **INTEGERS, help="Column factors; balanced ones if left out.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of the cores; the weight's if left out.")
def decompose(
    source: Path,
    target: Path,
    tables: tuple[str, ...],
    tt_ranks: tuple[int, ...] | None,
    max_bytes: int | None,
    num_cores: int | None,
    p_shapes: tuple[int, ...] | None,
    q_shapes: tuple[int, ...] | None,
    dtype: str | None,
) -> None:
    """Replace uncompressed tables of a checkpoint by TT-cores.

    SOURCE is a folder of torch.distributed.checkpoint or a file of torch.save, TARGET likewise: a
    file if it ends in .pt or .pth. All tables named get the same shape arguments.
    """
    if tt_ranks is None and max_bytes is None:
        raise click.UsageError("one of --tt-ranks and --max-bytes is needed")
    ranks = tt_ranks[0] if tt_ranks is not None and len(tt_ranks) == 1 else tt_ranks
    shape = {
        "tt_ranks": ranks,
        "max_bytes": max_bytes,
        "num_cores": num_cores,
        "p_shapes": p_shapes,
        "q_shapes": q_shapes,
        # For the number of bytes; float32 is suggest's own default.
        "dtype": getattr(torch, dtype or "float32"),
    }
    chosen = None if dtype is None else getattr(torch, dtype)
    specs = dict.fromkeys(tables, shape)
    _reported(lambda: decompose_checkpoint(source, target, specs, chosen), target)


@click.command("reconstruct")
@_paths
@click.option(
    "--table",
    "tables",
    multiple=True,
    required=True,
    type=(str, click.IntRange(min=1)),
    metavar="NAME N",
    help="A table and its number of embeddings; may be repeated.",
)
@click.option("--dtype", type=click.Choice(DTYPES), help="Of the weights; the cores' if left out.")
def reconstruct(
    source: Path, target: Path, tables: tuple[tuple[str, int], ...], dtype: str | None
) -> None:
    """Replace TT-cores of a checkpoint by the uncompressed tables they stand for.

    SOURCE is a folder of torch.distributed.checkpoint or a file of torch.save, TARGET likewise: a
    file if it ends in .pt or .pth.
    """
    chosen = None if dtype is None else getattr(torch, dtype)
    _reported(lambda: reconstruct_checkpoint(source, target, dict(tables), chosen), target)


@click.command("import-tt-rec")
@_paths
@click.option("--table", required=True, help="The table's name here.")
@click.option("--tt-ranks", **INTEGERS, required=True, help="The module's tt_ranks.")
@click.option("--num-embeddings", type=click.IntRange(min=1), required=True, help="Rows.")
@click.option("--source-table", type=int, default=0, show_default=True, help="Of the module.")
@click.option("--source-prefix", default="", help="What precedes tt_cores.0 in SOURCE.")
@click.option("--prefix", default="", help="What precedes embedding_bags in TARGET.")
@click.option("--ignore-cache", is_flag=True, help="Leave out rows that the cache has trained.")
def import_tt_rec(source: Path, target: Path, **settings: Any) -> None:
    """Import TT-cores that were trained with TT-Rec (FBTT-Embedding).

    SOURCE is a file of torch.save with a state dict. TARGET is a file if it ends in .pt or .pth,
    else a folder of torch.distributed.checkpoint.
    """
    _reported(lambda: import_checkpoint(source, target, **settings), target)
