"""MovieLens-100K from the files that the PyPI package recbole carries, cached and verified.

GroupLens' terms do not allow the data to be passed on without permission, so nothing of it is part
of this project: it is fetched once from the package index with pip into a cache outside the
repository. docs/data.md has the terms and the citation.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrec_flowtt.config import DataConfig, DataError

PACKAGE = "recbole==1.2.1"
MEMBER_FOLDER = "recbole/dataset_example/ml-100k"
SUFFIXES = ("inter", "item", "user")
SHA256 = {
    "ml-100k.inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    "ml-100k.item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
    "ml-100k.user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
}
CACHE_VARIABLE = "TORCHREC_FLOWTT_CACHE"


def cache_folder(config: DataConfig) -> Path:
    """``data.cache_dir``, or ``$TORCHREC_FLOWTT_CACHE``, or ``~/.cache/torchrec-flowtt``."""
    if config.cache_dir is not None:
        return config.cache_dir.expanduser()
    from_environment = os.environ.get(CACHE_VARIABLE)
    if from_environment:
        return Path(from_environment).expanduser()
    return Path.home() / ".cache" / "torchrec-flowtt"


def prepare_data(config: DataConfig) -> Path:
    """Returns the folder that holds ``<name>.inter``, ``.item`` and ``.user``.

    ``data.path`` is used as it is. Without it MovieLens-100K is taken from the cache, and fetched
    into it first if it is not there. Any number of processes may call this at once: a file lock
    lets one fetch while the others wait, and the files appear all together or not at all.

    Raises:
        DataError: a file of ``data.path`` is missing, a cached file is not what it should be, or
            the files cannot be fetched.
    """
    if config.path is not None:
        folder = config.path.expanduser()
        for suffix in SUFFIXES:
            file = folder / f"{config.name}.{suffix}"
            if not file.is_file():
                raise DataError(
                    f"data file {file} is missing; data.path needs"
                    f" {config.name}.inter, {config.name}.item and {config.name}.user"
                )
        return folder
    if config.name != "ml-100k":
        raise DataError(
            f"data.name {config.name!r} cannot be fetched, only ml-100k can; set data.path to the"
            f" folder of {config.name}.inter, {config.name}.item and {config.name}.user"
        )
    cache = cache_folder(config)
    folder = cache / "ml-100k"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not folder.is_dir():
            with _locked(cache / "ml-100k.lock"):
                if not folder.is_dir():
                    _fetch(cache, folder)
    except OSError as error:
        raise DataError(
            f"data cache {cache}: {error.strerror}; set data.cache_dir or {CACHE_VARIABLE} to a"
            " folder that can be written"
        ) from None
    _verify(folder)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(cache: Path, folder: Path) -> None:
    staging = Path(tempfile.mkdtemp(prefix=".ml-100k-", dir=cache))
    try:
        wheel = _download(staging / "wheel")
        extracted = staging / "files"
        extracted.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for file in SHA256:
                content = archive.read(f"{MEMBER_FOLDER}/{file}")
                (extracted / file).write_bytes(content)
        _verify(extracted)
        extracted.rename(folder)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DataError(f"{PACKAGE} does not hold the files expected: {error}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--retries=2", "--timeout=15"]
    command += ["--quiet", f"--dest={folder}", PACKAGE]
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        reason = lines[-1] if lines else f"pip ended with {result.returncode}"
        raise DataError(
            f"MovieLens-100K could not be fetched with `pip download {PACKAGE}` ({reason});"
            " check the network or set data.path to a folder with ml-100k.inter, ml-100k.item"
            " and ml-100k.user"
        )
    return wheels[0]


def _verify(folder: Path) -> None:
    for file, expected in SHA256.items():
        path = folder / file
        try:
            found = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise DataError(
                f"data file {path}: {error.strerror}; delete {folder} to have it fetched again"
            ) from None
        if found != expected:
            raise DataError(
                f"data file {path} is corrupt: SHA-256 {found[:12]}..., expected"
                f" {expected[:12]}...; delete {folder} to have it fetched again"
            )
