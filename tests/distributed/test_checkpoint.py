"""Checkpoints of two ranks resume exactly, on one, two and four ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import resharded
from tests.distributed.torchrun_launcher import Outcomes, run_script

CHECKS = [
    *resharded.SAVE_CHECKS,
    *resharded.LOAD_CHECKS,
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
    "asynchronous_adagrad",
    "asynchronous_adam",
    "asynchronous_dtensor",
    "converted_tables_load",
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


@pytest.fixture(scope="module", params=[1, 4])
def loaded(outcomes: Outcomes, folder: Path, request: pytest.FixtureRequest) -> Outcomes:
    for check in resharded.SAVE_CHECKS:
        outcomes.require(check)
    return run_script("ranks_checkpoint.py", "--load", str(folder), ranks=request.param)


@pytest.mark.parametrize("check", resharded.LOAD_CHECKS)
def test_load_on_other_numbers_of_ranks(loaded: Outcomes, check: str) -> None:
    loaded.require(check)
