"""The demonstration: the same job with uncompressed and with TT tables, and both side by side.

``python -m torchrec_flowtt.train.demo``, or ``flowtt demo``.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

from torchrec_flowtt.config import ConfigError, RunFolderError, load_config
from torchrec_flowtt.train.command import exit_with
from torchrec_flowtt.train.early_interruption import leave_quietly_on_ctrl_c
from torchrec_flowtt.train.run_folder import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    METRICS_FILE,
    TENSORBOARD_FOLDER,
    config_text,
    write_atomically,
    write_json,
)
from torchrec_flowtt.train.run_lock import LOCK_FILE, check_folder_unlocked, lock_folder

UNCOMPRESSED = ('tables=[{name: "*", kernel: fbgemm}]',)
RUNS: dict[str, Sequence[str]] = {"fbgemm": UNCOMPRESSED, "flowtt": ()}
SUMMARY_FILE = "summary.json"
SUMMARY_KEYS = ("test_auc", "test_log_loss", "table_bytes", "examples_per_second")
NEW_SUFFIX = ".new"


@click.command("demo")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    default=Path("configs/movielens.yaml"),
    show_default=True,
    help="YAML file of the run with TT tables.",
)
@click.option(
    "--run-dir",
    "folder",
    type=click.Path(path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    help="Where the two runs and summary.json go; earlier ones are replaced once both are done.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    envvar="DEVICE",
    help="Where to train; the environment variable DEVICE sets it too.",
)
@click.option(
    "--nproc-per-node",
    type=click.IntRange(min=1),
    help="Processes; 2, or on CUDA as many as there are GPUs up to 2, if left out.",
)
@click.argument("overrides", nargs=-1, metavar="[KEY.PATH=VALUE]...")
def demo(
    config_path: Path,
    folder: Path,
    device: str,
    nproc_per_node: int | None,
    overrides: Sequence[str],
) -> None:
    """Train once with uncompressed and once with TT tables, and compare.

    Everything but the kernel of the tables is the same in both runs.
    """
    processes = nproc_per_node or _default_processes(device)
    summary: dict[str, dict[str, Any]] = {}
    settings_of = {
        name: [*overrides, f"device={device}", f"run_folder={_staging(folder, name)}", *kernel]
        for name, kernel in RUNS.items()
    }
    # Whatever is wrong comes before the first training, not after it.
    for name in RUNS:
        for place in (folder / name, _staging(folder, name)):
            _check_own(place)
    click.get_current_context().call_on_close(_lock(folder))
    for name in RUNS:
        _clear(_staging(folder, name))
        _check(config_path, settings_of[name], processes)
    for name, settings in settings_of.items():
        staging = _staging(folder, name)
        click.echo(f"\n== {name}: {processes} process(es) under torchrun ==")
        click.echo(f"{staging} becomes {folder / name} when both runs are done")
        started = time.perf_counter()
        code = _run(config_path, settings, processes)
        if code:
            click.echo("a demonstration is not resumed: the next one starts over", err=True)
            sys.exit(code)
        metrics = json.loads((staging / METRICS_FILE).read_text(encoding="utf-8"))
        summary[name] = {key: metrics[key] for key in SUMMARY_KEYS}
        summary[name]["seconds"] = time.perf_counter() - started
    for name in RUNS:
        _record_folder(_staging(folder, name) / CONFIG_FILE, folder / name)
        _clear(folder / name)
        _staging(folder, name).rename(folder / name)
    write_json(folder / SUMMARY_FILE, summary)
    click.echo(f"\n{comparison(summary)}\n\nwritten to {folder / SUMMARY_FILE}")


def _default_processes(device: str) -> int:
    import torch

    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return max(1, min(2, torch.cuda.device_count()))
    return 2


def _staging(folder: Path, name: str) -> Path:
    return folder / f"{name}{NEW_SUFFIX}"


def _check(config_path: Path, settings: Sequence[str], processes: int) -> None:
    from torchrec_flowtt.train.preflight import prepare

    config = load_config(config_path, settings)
    if config.checkpoint.folder is not None:
        raise ConfigError(
            "checkpoint.folder: the two runs of a demonstration cannot share one; set it to null"
        )
    prepare(config, processes, resume=False)


def _run(config_path: Path, settings: Sequence[str], processes: int) -> int:
    from torchrec_flowtt.train.launch import launch_training

    checkpoints = load_config(config_path, settings).checkpoint_folder
    return launch_training([f"--config={config_path}", *settings], processes, checkpoints)


def _record_folder(path: Path, folder: Path) -> None:
    """Makes a run's recorded configuration one with which it can be resumed in ``folder``."""
    config = load_config(path)
    write_atomically(path, config_text(config.model_copy(update={"run_folder": folder})))


def _lock(folder: Path) -> Callable[[], None]:
    """Keeps other demonstrations away from the folder; returns what ends that.

    Raises:
        RunFolderError: another one is using it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return partial(os.close, lock_folder(folder))
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be used: {error.strerror}") from None


def _check_own(folder: Path) -> None:
    """Raises RunFolderError if a folder is there and is no run of an earlier demonstration."""
    if not folder.exists():
        return
    known = {CONFIG_FILE, METRICS_FILE, CHECKPOINT_FOLDER, TENSORBOARD_FOLDER, LOCK_FILE}
    try:
        foreign = sorted(path.name for path in folder.iterdir() if path.name not in known)
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be read: {error.strerror}") from None
    if foreign:
        raise RunFolderError(
            f"{folder} holds {foreign[0]}, which no demonstration wrote; move it away or give"
            " another --run-dir"
        )


def _clear(folder: Path) -> None:
    """Removes a run of an earlier demonstration, and nothing that is not one."""
    _check_own(folder)
    if not folder.exists():
        return
    # The processes of a demonstration that was killed may go on without it.
    check_folder_unlocked(folder)
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be removed: {error.strerror}") from None


def comparison(summary: dict[str, dict[str, Any]]) -> str:
    """Both runs as a table, with the last line saying how they differ.

    Args:
        summary: for ``fbgemm`` and ``flowtt`` the keys of ``summary.json``.
    """
    header = ["tables", "bytes", "test AUC", "test log-loss", "examples/s"]
    rows = [
        [
            name,
            f"{run['table_bytes']:,}",
            f"{run['test_auc']:.4f}",
            f"{run['test_log_loss']:.4f}",
            f"{run['examples_per_second']:,.0f}",
        ]
        for name, run in summary.items()
    ]
    full, compressed = summary["fbgemm"], summary["flowtt"]
    rows.append(
        [
            "flowtt against fbgemm",
            f"{full['table_bytes'] / compressed['table_bytes']:.0f} times smaller",
            f"{compressed['test_auc'] - full['test_auc']:+.4f}",
            f"{compressed['test_log_loss'] - full['test_log_loss']:+.4f}",
            f"{compressed['examples_per_second'] / full['examples_per_second']:.2f} times",
        ]
    )
    alignment = ["left", "right", "right", "right", "right"]
    return tabulate(rows, header, tablefmt="simple", colalign=alignment, disable_numparse=True)


if __name__ == "__main__":
    leave_quietly_on_ctrl_c()
    exit_with(lambda: demo.main(prog_name="flowtt demo", standalone_mode=False))
