"""Checkpoints of two ranks resume exactly, on two ranks and on one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.torchrun_launcher import Outcomes, run_script

CHECKS = [
    "save_for_other_world_sizes",
    "state_keys",
    "uncompressed_tables_keep_their_sharding",
    "learning_rate",
    "resume_adagrad",
    "resume_row_wise_adagrad",
    "resume_adam",
    "resume_on_other_ranks",
    "resume_adam_on_one_rank_of_two",
    "weights_between_table_wise_and_data_parallel",
    "dtensor_state",
    "adagrad_state_between_shardings",
    "adam_state_between_shardings",
    "sgd_between_shardings",
    "resume_sgd",
    "rank_without_tables_sgd",
    "rank_without_tables_adam",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Outcomes:
    return run_script("ranks_checkpoint.py", str(folder))


@pytest.mark.parametrize("check", CHECKS)
def test_checkpoint(outcomes: Outcomes, check: str) -> None:
    outcomes.require(check)


def test_load_on_one_rank(outcomes: Outcomes, folder: Path) -> None:
    outcomes.require("save_for_other_world_sizes")
    loaded = run_script("ranks_checkpoint.py", "--load", str(folder), ranks=1)
    loaded.require("load_on_this_world_size")
