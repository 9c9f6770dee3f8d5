"""Pipelines and learning rates by table, on two ranks."""

from __future__ import annotations

import pytest

from tests.distributed.torchrun_launcher import Outcomes, run_script

CHECKS = [
    "base",
    "eval_pipeline",
    "learning_rates_by_table",
]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_script("ranks_pipelines.py")


@pytest.mark.parametrize("check", CHECKS)
def test_pipelines(outcomes: Outcomes, check: str) -> None:
    outcomes.require(check)
