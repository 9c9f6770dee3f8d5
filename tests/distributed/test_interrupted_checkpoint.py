"""A checkpoint whose process is killed leaves the previous one as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.distributed import killed_save
from tests.distributed.torchrun_launcher import REPOSITORY


def test_a_killed_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(killed_save.__file__)), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["expected.pt", "one", "two.tmp"]
    assert list((tmp_path / "two.tmp").glob("*.distcp"))  # it was in the middle
    assert not (tmp_path / "two.tmp" / ".metadata").exists()

    module = killed_save.tables()
    state = {"model": module.state_dict()}
    with pytest.raises(CheckpointException):
        dcp.load(state, checkpoint_id=tmp_path / "two.tmp")
    dcp.load(state, checkpoint_id=tmp_path / "one")
    module.load_state_dict(state["model"])
    expected = torch.load(tmp_path / "expected.pt")
    assert module.state_dict().keys() == expected.keys()
    for key, value in module.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=0, msg=key)
