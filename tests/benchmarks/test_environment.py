from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ENVIRONMENT = Path(__file__).resolve().parents[2] / "benchmarks" / "environment.py"


def copy_in(root: Path) -> ModuleType:
    """A copy of the module that takes `root` for the repository."""
    (root / "benchmarks").mkdir()
    copy = shutil.copy(ENVIRONMENT, root / "benchmarks")
    spec = importlib.util.spec_from_file_location("environment_copy", copy)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("repository", ["none", "without commits"])
def test_a_tree_without_commits_takes_its_commit_from_the_environment(
    repository: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    if repository == "without commits":
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.setenv("SOURCE_COMMIT", "abc123")
    assert copy_in(tmp_path).git_commit() == "abc123"


def test_a_changed_tree_is_dirty(tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@example.com"]
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], cwd=tmp_path, check=True)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert copy_in(tmp_path).git_commit() == f"{head.stdout.strip()}-dirty"


@pytest.mark.parametrize(
    ("argument", "recorded"),
    [
        ("{root}/docs/lookup.json", "docs/lookup.json"),
        ("--output={root}/docs/lookup.json", "--output=docs/lookup.json"),
        ("/some/folder/lookup.json", "lookup.json"),
        ("--output=/some/folder/lookup.json", "--output=lookup.json"),
        ("docs/lookup.json", "docs/lookup.json"),
        ("--tables=4", "--tables=4"),
        ("two words", "'two words'"),
    ],
)
def test_the_recorded_command_has_no_folders_of_its_machine(
    argument: str, recorded: str, tmp_path: Path
) -> None:
    command = copy_in(tmp_path).recorded_command(["run.py", argument.format(root=tmp_path)])
    assert command == f"python run.py {recorded}"
