"""The demonstration: the same job with uncompressed and with TT tables, and both side by side.

``python -m torchrec_flowtt.train.demo``, or ``flowtt demo``.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

from torchrec_flowtt.config import RunFolderError, load_config
from torchrec_flowtt.train.command import exit_with
from torchrec_flowtt.train.run_folder import METRICS_FILE, write_json

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
    for name, kernel in RUNS.items():
        staging = folder / f"{name}{NEW_SUFFIX}"
        _clear(staging)
        settings = [*overrides, f"device={device}", f"run_folder={staging}", *kernel]
        click.echo(f"\n== {name}: {processes} process(es) under torchrun ==")
        started = time.perf_counter()
        code = _run(config_path, settings, processes)
        if code:
            sys.exit(code)
        metrics = json.loads((staging / METRICS_FILE).read_text(encoding="utf-8"))
        summary[name] = {key: metrics[key] for key in SUMMARY_KEYS}
        summary[name]["seconds"] = time.perf_counter() - started
    for name in RUNS:
        _clear(folder / name)
        (folder / f"{name}{NEW_SUFFIX}").rename(folder / name)
    write_json(folder / SUMMARY_FILE, summary)
    click.echo(f"\n{comparison(summary)}\n\nwritten to {folder / SUMMARY_FILE}")


def _default_processes(device: str) -> int:
    import torch

    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return max(1, min(2, torch.cuda.device_count()))
    return 2


def _run(config_path: Path, settings: Sequence[str], processes: int) -> int:
    from torchrec_flowtt.train.launch import launch_training
    from torchrec_flowtt.train.preflight import prepare

    prepare(load_config(config_path, settings), processes, resume=False)
    return launch_training([f"--config={config_path}", *settings], processes)


def _clear(folder: Path) -> None:
    """Removes a run of an earlier demonstration, and nothing that is not one."""
    if not folder.exists():
        return
    known = {"config.yaml", METRICS_FILE, "checkpoints", "tensorboard"}
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in known)
    if foreign:
        raise RunFolderError(
            f"{folder} holds {foreign[0]}, which no demonstration wrote; move it away or give"
            " another --run-dir"
        )
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
    exit_with(lambda: demo.main(prog_name="flowtt demo", standalone_mode=False))
