from __future__ import annotations

import pytest
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.types import ParameterSharding

from tests.distributed.sharded_models import Table
from torchrec_flowtt.distributed.plan_validation import validate_plan


def sharding(kind: str, kernel: str, *ranks: int) -> ParameterSharding:
    return ParameterSharding(sharding_type=kind, compute_kernel=kernel, ranks=list(ranks))


TT = sharding("table_wise", "customized_kernel", 0)
ROW_WISE = sharding("row_wise", "fused", 0, 1)


def test_ranks_and_shards_must_agree() -> None:
    shard = ShardMetadata(shard_offsets=[0, 0], shard_sizes=[60, 8], placement="rank:0/cpu")
    plan = ParameterSharding(
        sharding_type="table_wise",
        compute_kernel="customized_kernel",
        ranks=[1],
        sharding_spec=EnumerableShardingSpec([shard]),
    )
    with pytest.raises(ValueError, match=r"'a'.*ranks are \[1\].*shards on ranks \[0\]"):
        validate_plan([Table("a", "", ["a"]).config()], {"a": plan})
    plan.ranks = [0]
    validate_plan([Table("a", "", ["a"]).config()], {"a": plan})


def test_accepts_tt_tables_beside_any_other() -> None:
    tables = [Table("a", "", ["a"]), Table("b", "", ["b"]), Table("c", "", ["c"], tt=False)]
    plan = {"a": TT, "b": sharding("data_parallel", "customized_kernel", 0, 1), "c": ROW_WISE}
    validate_plan([t.config() for t in tables], plan)


def test_row_wise_mean_with_features_of_their_own_is_accepted() -> None:
    tables = [Table("a", "", ["a"]), Table("c", "", ["c"], tt=False, mean=True)]
    validate_plan([t.config() for t in tables], {"a": TT, "c": ROW_WISE})


def test_row_wise_mean_beside_a_shared_feature_is_refused() -> None:
    tables = [Table("a", "", ["shared"]), Table("c", "", ["shared"], tt=False, mean=True)]
    with pytest.raises(ValueError, match="'c' is row-wise.*'shared' feeds several tables"):
        validate_plan([t.config() for t in tables], {"a": TT, "c": ROW_WISE})


def test_row_wise_mean_keeps_shared_features_when_pooled_by_sum() -> None:
    tables = [Table("a", "", ["shared"]), Table("c", "", ["shared"], tt=False)]
    validate_plan([t.config() for t in tables], {"a": TT, "c": ROW_WISE})
