"""Names of optimizer states in the other sharding, for tables of every kind of collection."""

from __future__ import annotations

import pytest
import torch

from torchrec_flowtt.distributed.optimizer_states import saved_in_other_sharding


@pytest.mark.parametrize("tables", ["embedding_bags", "embeddings"])
def test_data_parallel_states_are_named_as_table_wise_ones(tables: str) -> None:
    key = f"sparse.{tables}.ads.tt_cores.0"
    own = {"step": torch.zeros(()), "sum": torch.ones(3)}
    state = {"state": {key: dict(own)}, "param_groups": []}
    with saved_in_other_sharding(state, ["ads"]):
        assert set(state["state"][key]) == {"ads.iter", "ads.momentum1"}
        state["state"][key]["ads.iter"].fill_(7)
    assert set(state["state"][key]) == {"step", "sum"}
    assert state["state"][key]["step"] == 7


@pytest.mark.parametrize("tables", ["embedding_bags", "embeddings"])
def test_tables_that_are_none(tables: str) -> None:
    entry = {"step": torch.zeros(()), "sum": torch.ones(3)}
    keys = [f"sparse.{tables}.ads.tt_cores.0", f"sparse.{tables}.plain.weight"]
    state = {"state": {key: dict(entry) for key in keys}, "param_groups": []}
    for name, error in (("typo", KeyError), ("plain", ValueError)):
        with pytest.raises(error, match=name), saved_in_other_sharding(state, [name]):
            pass
