"""Real runs of two ranks: complete, interrupted in the middle of an epoch, and resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.train import job_runs


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, config_path):
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    done = job_runs.run(
        job_runs.flowtt(
            "train", f"--config={config_path}", "--nproc-per-node=2", f"run_folder={folder}"
        )
    )
    assert done.code == 0, done.stderr
    return folder, done


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, config_path):
    """SIGINT on rank 1 alone, during step 47 of 90: the second epoch's 17th."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    done = job_runs.run(
        job_runs.torchrun(
            f"--config={config_path}", f"run_folder={folder}", script=job_runs.FAULTY_JOB
        ),
        FAULT_KIND="interrupt",
        FAULT_STEP="46",
        FAULT_RANK="1",
    )
    assert done.code != 0
    shutil.copytree(folder, folder.with_name("copy"))
    return folder, done, job_runs.metrics(folder), job_runs.checkpoints(folder)


@pytest.fixture(scope="module")
def resumed(interrupted, config_path):
    folder, *_ = interrupted
    done = job_runs.run(
        job_runs.torchrun(f"--config={config_path}", "--resume", f"run_folder={folder}")
    )
    assert done.code == 0, done.stderr
    return folder, done


def test_a_run_reports_plan_scores_and_memory(uninterrupted):
    folder, done = uninterrupted
    plan = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line}
    assert plan["cross_user_genre"][1:6] == ["flowtt", "4,096", "4,", "4", "table_wise"]
    assert plan["cross_occupation_age_item"][5:8] == ["data_parallel", "0,", "1"]
    assert plan["user"][1] == "fbgemm"
    assert "epoch 3/3: train loss" in done.stdout
    assert "test AUC" in done.stdout and "times smaller" in done.stdout
    metrics = job_runs.metrics(folder)
    assert metrics["complete"] is True and metrics["world_size"] == 2
    assert [row["epoch"] for row in metrics["epochs"]] == [1, 2, 3]
    assert [step for step, _ in metrics["losses"]] == list(range(1, 91))
    assert metrics["test_examples"] == 150
    # 16 x 1 x 2 x 4 + 16 x 4 x 2 x 4 + 16 x 4 x 2 x 1 parameters of 4 bytes, against 4,096 x 8.
    bytes_of = {row["table"]: row["bytes"] for row in metrics["tables"]}
    assert bytes_of["cross_user_genre"] == 4 * (128 + 512 + 128)
    full = {row["table"]: row["uncompressed_bytes"] for row in metrics["tables"]}
    assert full["cross_user_genre"] == 4096 * 8 * 4
    assert metrics["table_bytes"] == sum(bytes_of.values())
    assert job_runs.checkpoints(folder) == ["latest", "step-00000060", "step-00000090"]
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    assert (folder / "config.yaml").exists()


def test_training_learns(uninterrupted):
    metrics = job_runs.metrics(uninterrupted[0])
    losses = [loss for _, loss in metrics["losses"]]
    assert sum(losses[-10:]) / 10 < sum(losses[:10]) / 10 - 0.1
    assert metrics["test_auc"] > 0.7


def test_one_rank_s_ctrl_c_stops_all_after_the_same_step(interrupted):
    _, done, metrics, checkpoints = interrupted
    assert len(done.error_lines) == 1
    assert "stopped after step 47; its checkpoint is in" in done.error_lines[0]
    # Rank 1's flag goes into the vote that begins with the step after the signal.
    assert checkpoints[-1] == "step-00000047" and "latest" in checkpoints
    assert metrics["complete"] is False
    assert len(metrics["losses"]) == 47


def test_a_resumed_run_has_the_same_losses_and_scores(uninterrupted, resumed):
    expected, found = (job_runs.metrics(run[0]) for run in (uninterrupted, resumed))
    assert found["losses"] == expected["losses"]
    assert found["epochs"] == expected["epochs"]
    for key in ("test_auc", "test_log_loss", "table_bytes", "complete"):
        assert found[key] == expected[key]


def test_a_resumed_run_ends_with_the_same_state(uninterrupted, resumed, tmp_path):
    states = []
    for name, (folder, _) in (("a", uninterrupted), ("b", resumed)):
        target = tmp_path / f"{name}.pt"
        dcp_to_torch_save(folder / "checkpoints" / "step-00000090", target)
        states.append(torch.load(target, weights_only=False))
    assert states[0].keys() == states[1].keys()
    kinds = {key.split("/")[0] for key in states[0]}
    assert kinds == {"model", "optimizer", "random"}
    cores = [key for key in states[0] if ".cross_user_genre.tt_cores." in key]
    assert len(cores) >= 6  # three cores and their optimizer state
    for key, expected in states[0].items():
        assert torch.equal(torch.as_tensor(expected), torch.as_tensor(states[1][key])), key


def test_reported_losses_do_not_depend_on_the_number_of_processes(
    uninterrupted, interrupted, config_path
):
    folder = interrupted[0].with_name("copy")
    done = job_runs.run(
        job_runs.flowtt("train", f"--config={config_path}", "--resume", f"run_folder={folder}")
    )
    assert done.code == 0, done.stderr
    expected, found = job_runs.metrics(uninterrupted[0]), job_runs.metrics(folder)
    assert [step for step, _ in found["losses"]] == [step for step, _ in expected["losses"]]
    for (_, loss), (_, reference) in zip(found["losses"], expected["losses"], strict=True):
        assert loss == pytest.approx(reference, rel=1e-4)
    for row, reference in zip(found["epochs"], expected["epochs"], strict=True):
        assert row["train_loss"] == pytest.approx(reference["train_loss"], rel=1e-4)


def test_a_complete_run_can_be_extended_in_one_process(resumed, config_path):
    """``auto`` follows the checkpoint, whatever the planner would choose for one process."""
    folder, _ = resumed
    cross = "{name: 'cross_*', kernel: flowtt, tt_ranks: 4}"
    before = {row["table"]: row["sharding"] for row in job_runs.metrics(folder)["tables"]}
    done = job_runs.run(
        job_runs.flowtt(
            *("train", f"--config={config_path}", "--resume", f"tables=[{cross}]"),
            *(f"run_folder={folder}", "train.epochs=4"),
        )
    )
    after = {row["table"]: row["sharding"] for row in job_runs.metrics(folder)["tables"]}
    assert set(before.values()) == {"table_wise", "data_parallel"} and after == before
    assert done.code == 0, done.stderr
    assert "training from step 90 on 1 cpu process(es)" in done.stdout
    assert [row["epoch"] for row in job_runs.metrics(folder)["epochs"]] == [1, 2, 3, 4]


def test_ctrl_c_in_the_terminal_leaves_a_checkpoint_and_130(tmp_path, config_path):
    folder = tmp_path / "run"

    def press_ctrl_c(line: str, group: int) -> None:
        if line.startswith("epoch 1/"):
            os.killpg(group, signal.SIGINT)

    done = job_runs.run(
        job_runs.flowtt(
            *("train", f"--config={config_path}", "--nproc-per-node=2"),
            *(f"run_folder={folder}", "train.epochs=500"),
        ),
        on_line=press_ctrl_c,
    )
    assert done.code == 130, done.stderr
    assert len(done.error_lines) == 1 and "Traceback" not in done.stderr
    latest = (folder / "checkpoints" / "latest").read_text().strip()
    record = json.loads((folder / "checkpoints" / latest / "job.json").read_text())
    assert 30 <= record["progress"]["global_step"] < 15_000
