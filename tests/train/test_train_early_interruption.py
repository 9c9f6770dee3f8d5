"""Ctrl-C while the program loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.train.job_runs import REPOSITORY

# Presses Ctrl-C at the moment when a module is looked for.
CODE = """
import os, runpy, signal, sys

class PressCtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == watched:
            os.kill(os.getpid(), signal.SIGINT)

module, watched, repository, *arguments = sys.argv[1:]
sys.argv = ["flowtt", *arguments]
sys.path.insert(0, repository)
sys.meta_path.insert(0, PressCtrlC())
runpy.run_module(module, run_name="__main__")
"""


@pytest.mark.parametrize("loaded", ["torch", "numpy"])
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("torchrec_flowtt.train", []),
        ("torchrec_flowtt.cli.main", ["train"]),
        ("torchrec_flowtt.cli.main", ["train", "--nproc-per-node=2"]),
        ("torchrec_flowtt.cli.main", ["demo"]),
    ],
)
def test_ctrl_c_while_loading_is_quiet(module, arguments, loaded, tmp_path):
    command = [sys.executable, "-c", CODE, module, loaded, str(REPOSITORY), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
