"""Faults under a real torchrun: every process ends, soon, and one line says why."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from tests.train import job_runs
from torchrec_flowtt.config import load_config
from torchrec_flowtt.train import checkpoint
from torchrec_flowtt.train.preflight import prepare

pytestmark = pytest.mark.slow


def test_a_mistake_that_all_ranks_see_is_told_once(config_path, tmp_path):
    done = job_runs.run(
        job_runs.torchrun(
            *(f"--config={config_path}", f"run_folder={tmp_path / 'run'}"),
            'tables=[{name: "usr"}]',
        ),
        timeout=60,
    )
    assert done.code != 0
    assert len(done.error_lines) == 1
    assert "no table matches 'usr'; did you mean user?" in done.error_lines[0]
    assert not (tmp_path / "run").exists()


def test_a_mistake_that_only_rank_0_sees_ends_the_others(config_path, tmp_path):
    kept = tmp_path / "run" / "notes.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    done = job_runs.run(
        job_runs.torchrun(f"--config={config_path}", f"run_folder={kept.parent}"), timeout=60
    )
    assert done.code != 0
    assert len(done.error_lines) == 1 and "already holds files" in done.error_lines[0]
    assert [path.name for path in kept.parent.iterdir()] == ["notes.txt"]


def test_the_console_script_checks_before_it_starts_anything(config_path, tmp_path):
    done = job_runs.run(
        job_runs.flowtt(
            *("train", f"--config={config_path}", "--nproc-per-node=11"),
            *(f"run_folder={tmp_path / 'run'}", "train.batch_size=44"),
        ),
        timeout=60,
    )
    assert done.code == 2
    assert done.stderr.splitlines() == done.error_lines
    assert "11 processes are more than the 10 tables" in done.error_lines[0]


def test_an_exception_on_one_rank_ends_all(config_path, tmp_path):
    done = job_runs.run(
        job_runs.torchrun(
            *(f"--config={config_path}", f"run_folder={tmp_path / 'run'}"),
            script=job_runs.FAULTY_JOB,
        ),
        timeout=60,
        FAULT_KIND="raise",
        FAULT_STEP="5",
        FAULT_RANK="1",
    )
    assert done.code != 0
    assert "ZeroDivisionError: injected" in done.stderr


@pytest.fixture(scope="module")
def disk_full(config_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("disk") / "run"
    done = job_runs.run(
        job_runs.torchrun(
            f"--config={config_path}", f"run_folder={folder}", script=job_runs.FAULTY_JOB
        ),
        timeout=60,
        FAULT_KIND="disk",
        FAULT_STEP="60",
        FAULT_RANK="1",
    )
    return folder, done


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_one_line(disk_full):
    folder, done = disk_full
    assert done.code != 0
    assert len(done.error_lines) == 1
    assert "step-00000060 cannot be written (rank 1: No space left" in done.error_lines[0]
    assert "the previous one is still in force" in done.error_lines[0]
    assert (folder / "checkpoints" / "latest").read_text() == "step-00000030\n"


def test_the_previous_checkpoint_can_be_resumed(disk_full, config_path):
    folder, _ = disk_full
    done = job_runs.run(
        job_runs.flowtt("train", f"--config={config_path}", "--resume", f"run_folder={folder}")
    )
    assert done.code == 0, done.stderr
    assert "training from step 30" in done.stdout
    assert job_runs.checkpoints(folder) == ["latest", "step-00000060", "step-00000090"]


def test_a_kill_in_the_middle_of_a_checkpoint_leaves_the_previous_one(config_path, tmp_path):
    folder = tmp_path / "run"
    done = job_runs.run(
        job_runs.torchrun(
            f"--config={config_path}", f"run_folder={folder}", script=job_runs.FAULTY_JOB
        ),
        timeout=60,
        FAULT_KIND="kill",
        FAULT_STEP="60",
        FAULT_RANK="0",
    )
    assert done.code != 0
    half = list((folder / "checkpoints").glob("*step-00000060"))
    assert len(half) == 1 and half[0].name != "step-00000060"
    assert list(half[0].glob("*.distcp")) and not (half[0] / ".metadata").exists()
    config = load_config(config_path, [f"run_folder={folder}"])
    assert prepare(config, 2, resume=True).progress.global_step == 30  # after a check of its sums


def test_a_killed_rank_is_the_last_word(config_path, tmp_path):
    def kill_rank_1(line: str, launcher: int) -> None:
        if line.startswith("epoch 2/"):
            children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
            for child in children:
                if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes():
                    os.kill(int(child), signal.SIGKILL)

    done = job_runs.run(
        job_runs.flowtt(
            *("train", f"--config={config_path}", "--nproc-per-node=2", "train.epochs=500"),
            f"run_folder={tmp_path / 'run'}",
        ),
        on_line=kill_rank_1,
    )
    assert done.code == 1
    assert "Traceback" not in done.stderr
    latest = (tmp_path / "run" / "checkpoints" / "latest").read_text()
    assert done.stderr.splitlines()[-1] == (
        "flowtt: error: rank 1 died (SIGKILL); the last checkpoint is step"
        f" {int(latest.removeprefix('step-'))}, --resume continues from there"
    )


def test_a_run_that_diverges_says_so_and_can_be_restarted(config_path, tmp_path):
    folder = tmp_path / "run"
    overrides = [f"run_folder={folder}", "train.log_every=7"]
    done = job_runs.run(
        job_runs.flowtt(
            "train", f"--config={config_path}", *overrides, "optimizer.sparse.learning_rate=1e30"
        )
    )
    assert done.code == 6
    assert done.stderr.splitlines() == done.error_lines and len(done.error_lines) == 1
    assert "training loss is not a finite number any more at step 7: " in done.error_lines[0]
    assert "lower optimizer.sparse.learning_rate" in done.error_lines[0]
    prepare(load_config(config_path, overrides), 1, resume=False)


def test_tables_that_fit_nowhere_are_one_line(config_path, tmp_path):
    folder = tmp_path / "run"
    overrides = [f"run_folder={folder}", "data.cross_rows=1099511627776", "tables=[]"]
    done = job_runs.run(job_runs.flowtt("train", f"--config={config_path}", *overrides))
    assert done.code == 2
    assert done.stderr.splitlines() == done.error_lines and len(done.error_lines) == 1
    assert "the planner finds no placement for the tables on 1 cpu process(es): " in done.stderr
    prepare(load_config(config_path, [f"run_folder={folder}"]), 1, resume=False)


def test_an_unclear_writing_error_on_a_full_disk(monkeypatch, tmp_path):
    cause = RuntimeError("unexpected pos 64 vs 0\nmore")
    error = CheckpointException("write", {1: (cause, StackSummary())})
    assert checkpoint._reason(error, tmp_path) == "rank 1: unexpected pos 64 vs 0"
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    assert checkpoint._reason(error, tmp_path) == "rank 1: No space left on device"


def test_only_an_earlier_checkpoint_is_still_in_force(tmp_path):
    store = checkpoint.CheckpointStore(tmp_path, 2, None)
    assert store._still_there() == "there is no earlier one"
    (tmp_path / "latest").write_text("step-00000001\n")
    assert store._still_there() == "the previous one is still in force"
