"""Sharded training on two ranks equals a float64 reference."""

from __future__ import annotations

import pytest

from tests.distributed.torchrun_launcher import Outcomes, run_script

CHECKS = [
    "tt_beside_fbgemm",
    "tt_beside_fbgemm_mean",
    "weighted",
    "ranks_differ_in_weights_dtype",
    "only_tt",
    "ranks_differ_in_batch_size",
    "rank_without_examples",
    "batches_without_lookups",
    "kept_packed_cores",
    "half_precision_communication",
    "row_wise_mean_beside_tt_sum",
    "variable_batch_table_wise",
    "variable_batch_data_parallel",
]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_script("ranks_training.py")


@pytest.mark.parametrize("check", CHECKS)
def test_sharded_training(outcomes: Outcomes, check: str) -> None:
    outcomes.require(check)
