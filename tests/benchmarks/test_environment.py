from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

ENVIRONMENT = Path(__file__).resolve().parents[2] / "benchmarks" / "environment.py"


def commit_of_copy_in(root: Path) -> str:
    """What a copy of the module says about the tree it is in."""
    (root / "benchmarks").mkdir()
    copy = shutil.copy(ENVIRONMENT, root / "benchmarks")
    spec = importlib.util.spec_from_file_location("environment_copy", copy)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.git_commit()


@pytest.mark.parametrize("repository", ["none", "without commits"])
def test_a_tree_without_commits_takes_its_commit_from_the_environment(
    repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    if repository == "without commits":
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setenv("SOURCE_COMMIT", "abc123")
    assert commit_of_copy_in(tmp_path) == "abc123"


def test_a_changed_tree_is_dirty(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], cwd=tmp_path, check=True)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert commit_of_copy_in(tmp_path) == f"{head.stdout.strip()}-dirty"
