"""docs/kernels.md is the map of the CUDA sources: it names all of them and no others."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    path.relative_to(ROOT / "csrc").as_posix()
    for path in (ROOT / "csrc").rglob("*")
    if path.suffix in (".cpp", ".cu", ".cuh", ".h")
}
NAMED = re.findall(r"`([\w/*]+\.(?:cpp|cuh?|h))`", (ROOT / "docs/kernels.md").read_text())


def named_files(pattern: str) -> set[str]:
    """Sources that a name in the page stands for, with or without its folder."""
    return {path for path in SOURCES if fnmatch.fnmatch(f"/{path}", f"*/{pattern}")}


def test_every_name_is_a_file() -> None:
    assert [name for name in NAMED if not named_files(name)] == []


def test_every_cuda_source_is_named() -> None:
    found = set().union(*map(named_files, NAMED))
    missing = sorted(path for path in SOURCES if path.startswith("cuda/") and path not in found)
    assert missing == [], "name them in docs/kernels.md, where a reader would look for them"


def test_every_cuda_source_says_what_it_is_for() -> None:
    silent = [path for path in SOURCES if not (ROOT / "csrc" / path).read_text().startswith("//")]
    assert [path for path in silent if path.startswith("cuda/")] == []
