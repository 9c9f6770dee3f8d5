"""The whole folder compiles the kernels, for a minute, and is slow."""

from __future__ import annotations

import os
import platform
import shutil
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _what_is_missing() -> str | None:
    if platform.machine() != "x86_64":
        return "threads are switched in the instructions of x86-64"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "no C++ compiler"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test of this folder, and no other."""
    missing = _what_is_missing()
    for item in items:
        if HERE not in Path(item.path).parents:
            continue
        item.add_marker(pytest.mark.slow)
        if missing is not None:
            item.add_marker(pytest.mark.skip(reason=missing))
