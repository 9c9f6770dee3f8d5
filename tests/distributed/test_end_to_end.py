"""The user's whole path on two ranks, and refusals that leave no rank waiting."""

from __future__ import annotations

import pytest

from tests.distributed.torchrun_launcher import Outcomes, run_script

CHECKS = [
    "planned_pipeline_equals_plain_loop",
    "rows_are_known_on_every_rank",
    "optimizer_applied_in_backward",
    "starts_as_configured",
    "without_plan",
    "torchrec_planner",
    "wrong_plans",
    "wrong_fused_params",
    "planning_errors_reach_every_rank",
    "wrong_collections_and_sharders",
    "two_dimensional_parallelism",
    "dynamic_resharding",
    "never_allocates_the_table",
]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_script("ranks_end_to_end.py")


@pytest.mark.parametrize("check", CHECKS)
def test_end_to_end(outcomes: Outcomes, check: str) -> None:
    outcomes.require(check)
