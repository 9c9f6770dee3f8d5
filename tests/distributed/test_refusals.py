"""Mistakes are refused on every rank alike, so that none is left waiting."""

from __future__ import annotations

import pytest

from tests.distributed.torchrun_launcher import Outcomes, run_script

CHECKS = [
    "without_plan",
    "torchrec_planner",
    "wrong_plans",
    "wrong_fused_params",
    "fused_optimizers_without_cpu_kernel",
    "fused_optimizers_set_on_parameters",
    "planning_errors_reach_every_rank",
    "wrong_collections_and_sharders",
    "two_dimensional_parallelism",
    "dynamic_resharding",
    "dtypes_of_batches",
    "dtypes_of_batches_that_stay",
]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_script("ranks_refusals.py")


@pytest.mark.parametrize("check", CHECKS)
def test_refusals(outcomes: Outcomes, check: str) -> None:
    outcomes.require(check)
