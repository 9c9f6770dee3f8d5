"""One live run per folder: a lock that the kernel releases when its process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from torchrec_flowtt.config import JobConfig, RunFolderError

LOCK_FILE = ".lock"
_BUSY = (errno.EAGAIN, errno.EACCES)


def check_unlocked(config: JobConfig) -> None:
    """Checks that no live run uses the run folder or the checkpoint folder; writes nothing.

    Raises:
        RunFolderError: one does.
    """
    for folder in _folders(config):
        check_folder_unlocked(folder)


def lock_folders(config: JobConfig) -> None:
    """Locks both folders, which exist, until this process ends, however it ends.

    Raises:
        RunFolderError: a live run has one of them.
        OSError: the lock's file cannot be made.
    """
    for folder in _folders(config):
        lock_folder(folder)


def check_folder_unlocked(folder: Path) -> None:
    """Checks that no live run uses the folder; writes nothing.

    Raises:
        RunFolderError: one does.
    """
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR)
    except OSError:
        return
    try:
        _lock(descriptor, folder)
    finally:
        os.close(descriptor)


def lock_folder(folder: Path) -> int:
    """Locks the folder, which exists, until this process ends, however it ends.

    Returns:
        A descriptor; closing it unlocks the folder before.

    Raises:
        RunFolderError: a live run has it.
        OSError: the lock's file cannot be made.
    """
    # The lock lives as long as the descriptor, and that as long as the process.
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    _lock(descriptor, folder)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _folders(config: JobConfig) -> list[Path]:
    folders = {folder.resolve(): folder for folder in (config.run_folder, config.checkpoint_folder)}
    return list(folders.values())


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # A file system without locks keeps nobody out, and must not keep everybody out.
        if error.errno not in _BUSY:
            return
        process = ""
        with contextlib.suppress(OSError, ValueError):
            process = f" (process {int(os.pread(descriptor, 32, 0))})"
        raise RunFolderError(
            f"{folder} is in use by another run that is still alive{process}; wait for it, stop"
            " it, or give another folder"
        ) from None
