"""Sharded sequence embeddings on two ranks: training, refusals, checkpoints, pipelines."""

from __future__ import annotations

import pytest

from tests.distributed.torchrun_launcher import Outcomes, run_script

CHECKS = [
    "tt_beside_fbgemm",
    "only_tt_in_unequal_batches",
    "rank_without_samples",
    "loaded_from_the_unsharded_collection",
    "batches_without_lookups",
    "output_dtype",
    "refusals",
    "wrong_batches",
    "checkpoint_on_swapped_ranks",
    "planned_pipeline_equals_plain_loop",
]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_script("ranks_sequence.py")


@pytest.mark.parametrize("check", CHECKS)
def test_sharded_sequence(outcomes: Outcomes, check: str) -> None:
    outcomes.require(check)
