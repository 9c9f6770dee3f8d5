"""Checksums of a checkpoint's files, so that damage is seen before anything is loaded.

``SHA256SUMS`` has the format of the sha256sum tool: ``sha256sum -c SHA256SUMS`` in the checkpoint's
folder checks it by hand.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from torchrec_flowtt.config import CheckpointError
from torchrec_flowtt.train.run_folder import LATEST_FILE, write_atomically

SUMS_FILE = "SHA256SUMS"
_BLOCK = 1 << 20
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\0\n]+)\n")


def write_sums(checkpoint: Path) -> None:
    """Writes the sums of all files of a folder; the last thing that happens to it."""
    files = sorted(path for path in checkpoint.iterdir() if path.name != SUMS_FILE)
    lines = [f"{_sha256(path)}  {path.name}\n" for path in files]
    write_atomically(checkpoint / SUMS_FILE, "".join(lines))


def check_sums(checkpoint: Path) -> None:
    """Compares every file with its sum.

    Raises:
        CheckpointError: one is missing or was changed; names it, and how to go back.
    """
    try:
        text = (checkpoint / SUMS_FILE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        raise _damaged(checkpoint, f"{SUMS_FILE} cannot be read") from None
    lines = [_LINE.fullmatch(line) for line in text.splitlines(keepends=True)]
    sums = [(line[1], line[2]) for line in lines if line is not None]
    listed = {name for _, name in sums}
    # A list that is cut off between two lines looks whole, but lacks files.
    present = {path.name for path in checkpoint.iterdir() if _is_data(path.name)}
    if len(sums) < len(lines) or not present <= listed:
        raise _damaged(checkpoint, f"{SUMS_FILE} is not what was written")
    for expected, name in sums:
        try:
            found = _sha256(checkpoint / name)
        except FileNotFoundError:
            raise _damaged(checkpoint, f"{name} is missing") from None
        except OSError as error:
            raise _damaged(checkpoint, f"{name} cannot be read: {error.strerror}") from None
        if found != expected:
            raise _damaged(checkpoint, f"{name} is not what was written")


def _is_data(name: str) -> bool:
    return name != SUMS_FILE and (name == ".metadata" or not name.startswith("."))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _damaged(checkpoint: Path, what: str) -> CheckpointError:
    folder = checkpoint.parent
    others = sorted(
        path.name
        for path in folder.glob("step-*")
        if path.is_dir() and path.name != checkpoint.name
    )
    if others:
        advice = f"to go back to another one, write {others[-1]} into {folder / LATEST_FILE}"
    else:
        advice = f"{folder} holds no other one, so start again in another run_folder"
    return CheckpointError(f"checkpoint {checkpoint} is damaged: {what}; {advice}")
