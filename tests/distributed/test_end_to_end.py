"""The user's whole path on two ranks."""

from __future__ import annotations

import pytest

from tests.distributed.torchrun_launcher import Outcomes, run_script

CHECKS = [
    "planned_pipeline_equals_plain_loop",
    "rows_are_known_on_every_rank",
    "optimizer_applied_in_backward",
    "starts_as_configured",
    "weights_of_a_model_on_an_accelerator_are_kept",
    "never_allocates_the_table",
    "example_predicts_the_same_under_every_plan",
]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_script("ranks_end_to_end.py")


@pytest.mark.parametrize("check", CHECKS)
def test_end_to_end(outcomes: Outcomes, check: str) -> None:
    outcomes.require(check)
