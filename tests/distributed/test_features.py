"""TorchRec's features around TT tables, on two ranks."""

from __future__ import annotations

import pytest

from tests.distributed.torchrun_launcher import Outcomes, run_script

CHECKS = [
    "feature_processors",
    "feature_processors_without_row_wise",
    "feature_processors_planned",
    "feature_processors_refused",
    "managed_collisions",
]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_script("ranks_features.py")


@pytest.mark.parametrize("check", CHECKS)
def test_features(outcomes: Outcomes, check: str) -> None:
    outcomes.require(check)
