"""Faults under a real torchrun: every process ends, soon, and one line says why."""

from __future__ import annotations

import pytest

from tests.train import job_runs


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
