"""What a result needs to be measured again: machine, versions, commit and command."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import torch

_PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec-flowtt")
_SOURCES = ("csrc", "cmake", "torchrec_flowtt", "benchmarks", "configs")


def cpu_model() -> str:
    """The processor's name, as the kernel tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def git_commit() -> str:
    """The checked-out commit, with "-dirty" when sources differ from it.

    Where there is none (in an exported tree, say) it is what the environment variable SOURCE_COMMIT
    says, or "unknown".
    """
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        result = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        return result.stdout.strip()

    try:
        commit = git("rev-parse", "--verify", "--quiet", "HEAD")
    except FileNotFoundError:  # no git at all
        commit = ""
    if not commit:
        return os.environ.get("SOURCE_COMMIT", "unknown")
    return f"{commit}-dirty" if git("status", "--porcelain", "--", *_SOURCES) else commit


def versions() -> dict[str, str]:
    """Python and the installed packages that a result depends on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def driver_version() -> str:
    """Of the NVIDIA driver, "unknown" where its tool does not tell."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        result = subprocess.run(query, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return result.stdout.strip() if result.returncode == 0 else "unknown"


def describe_cards() -> dict[str, object]:
    """Card, driver and CUDA version; nothing on a machine without a GPU."""
    if not torch.cuda.is_available():
        return {}
    return {
        "card": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "cuda": torch.version.cuda,
    }


def recorded_command(argv: Sequence[str]) -> str:
    """The command line without the folders of the machine that ran it.

    Absolute paths inside the repository become relative to it, others keep their name alone.
    """
    root = Path(__file__).resolve().parents[1]

    def portable(argument: str) -> str:
        option, equals, value = argument.rpartition("=")
        path = Path(value)
        if not path.is_absolute():
            return argument
        short = path.relative_to(root) if path.is_relative_to(root) else path.name
        return f"{option}{equals}{short}"

    return shlex.join(["python", *map(portable, argv)])


def describe_run() -> dict[str, object]:
    """The entries that every result file begins with."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "command": recorded_command(sys.argv),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": git_commit(),
        "cpu": cpu_model(),
        "gpus": gpus,
        **describe_cards(),
        "versions": versions(),
    }
