from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_flowtt.distributed import (
    FlowTTEmbeddingBagCollection,
    FlowTTEmbeddingBagCollectionSharder,
    FlowTTEmbeddingBagConfig,
)
from torchrec_flowtt.planner import (
    FlowTTEmbeddingEnumerator,
    FlowTTEmbeddingShardingPlanner,
    FlowTTEmbeddingStats,
    PlacementRow,
    TTLookupCost,
)
from torchrec_flowtt.planner.placement import placement_rows, table_shapes
from torchrec_flowtt.planner.stats import placement_table

ADS = FlowTTEmbeddingBagConfig(
    name="ads",
    num_embeddings=100_000_000,
    embedding_dim=128,
    feature_names=["ad"],
    tt_ranks=(32, 16),
)
COUNTRY = EmbeddingBagConfig(
    name="country", num_embeddings=250, embedding_dim=128, feature_names=["country"]
)


def model(*tables: EmbeddingBagConfig) -> nn.Module:
    module = nn.Module()
    module.sparse = FlowTTEmbeddingBagCollection(
        tables=list(tables) or [ADS, COUNTRY], device="meta"
    )
    return module


def planner(device: str = "cuda", **kwargs: object) -> FlowTTEmbeddingShardingPlanner:
    topology = Topology(world_size=2, compute_device=device, **kwargs.pop("caps", {}))
    return FlowTTEmbeddingShardingPlanner(topology=topology, batch_size=64, **kwargs)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("sharding_type", ["table_wise", "data_parallel"])
def test_plans_tt_tables(device: str, sharding_type: str) -> None:
    constraints = {"ads": ParameterConstraints(sharding_types=[sharding_type])}
    made = planner(device, constraints=constraints)
    plan = made.plan(model())
    ads = plan.plan["sparse"]["ads"]
    assert (ads.sharding_type, ads.compute_kernel) == (sharding_type, "customized_kernel")
    assert plan.plan["sparse"]["country"].compute_kernel != "customized_kernel"
    row = {row.table: row for row in made.placement_rows(plan)}["ads"]
    assert row == PlacementRow(
        module="sparse",
        table="ads",
        kernel="flowtt",
        tt_ranks=(32, 16),
        sharding_type=sharding_type,
        ranks=tuple(ads.ranks),
        num_embeddings=100_000_000,
        embedding_dim=128,
        num_bytes=ADS.tt_spec.num_bytes(),
        uncompressed_bytes=100_000_000 * 128 * 4,
    )
    assert row.compression_ratio == pytest.approx(ADS.tt_spec.compression_ratio)


def test_fits_where_the_uncompressed_table_does_not() -> None:
    caps = {"hbm_cap": 200 * 1024**2}
    assert planner(caps=caps).plan(model()).plan["sparse"]["ads"]
    large = EmbeddingBagConfig(
        name="large", num_embeddings=1_000_000, embedding_dim=128, feature_names=["l"]
    )
    in_memory = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    with pytest.raises(PlannerError):
        planner(caps=caps, constraints={"large": in_memory}).plan(model(large))


def test_tables_are_spread_over_the_ranks() -> None:
    tables = [
        FlowTTEmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=10_000_000,
            embedding_dim=64,
            feature_names=[f"f{i}"],
            tt_ranks=16,
        )
        for i in range(4)
    ]
    constraints = {t.name: ParameterConstraints(sharding_types=["table_wise"]) for t in tables}
    plan = planner(constraints=constraints).plan(model(*tables))
    ranks = [sharding.ranks[0] for sharding in plan.plan["sparse"].values()]
    assert sorted(ranks) == [0, 0, 1, 1]


def test_report(caplog: pytest.LogCaptureFixture) -> None:
    stats = FlowTTEmbeddingStats()
    constraints = {"ads": ParameterConstraints(sharding_types=["table_wise"])}
    made = planner(stats=stats, constraints=constraints)
    with caplog.at_level(logging.INFO):
        plan = made.plan(model())
    text = "\n".join(stats._stats_table)
    # TorchRec's part: the rows of the table, and the bytes of the cores instead of 51 GB.
    assert "100000000" in text
    assert f"{round(100_000_000 * 128 * 4 / 1024**3, 3)} GB" not in text
    heading = "Compute Kernels Embedding Weights"
    if heading in text:  # TorchRec 1.8 and later
        gigabytes = ADS.tt_spec.num_bytes() / 1024**3
        weights = text[text.index(heading) :].splitlines()[1]
        assert f"customized_kernel: {round(gigabytes, 3)} GB" in weights
    # Our part: one line a table.
    line = next(line for line in text.splitlines() if line.startswith("sparse.ads"))
    assert line.split() == [
        "sparse.ads",
        "flowtt",
        "32,16",
        "table_wise",
        str(plan.plan["sparse"]["ads"].ranks[0]),
        f"{ADS.tt_spec.num_bytes():,}",
        "51,200,000,000",
        f"{ADS.tt_spec.compression_ratio:,.1f}x",
    ]
    assert line in caplog.text


def test_report_without_tt_tables_is_torchrecs() -> None:
    stats = FlowTTEmbeddingStats()
    planner(stats=stats).plan(model(COUNTRY))
    assert not any(line.startswith("Tables:") for line in stats._stats_table)


def test_placement_table() -> None:
    rows = [
        PlacementRow("m", "a", "flowtt", (4, 4), "data_parallel", (0, 1, 2, 3), 100, 8, 64, 3200),
        PlacementRow("", "b", "fused", (), "row_wise", (0, 2), 10, 8, 320, 320),
    ]
    assert placement_table(rows) == [
        "Table  Kernel  TT-ranks  Sharding       Placed on  Bytes  Uncompressed  Compression",
        "-----  ------  --------  -------------  ---------  -----  ------------  -----------",
        "m.a    flowtt  4,4       data_parallel  0-3           64         3,200        50.0x",
        "b      fused   -         row_wise       0,2          320           320         1.0x",
    ]


def test_rows_of_a_plan_of_another_model() -> None:
    made = planner()
    plan = made.plan(model())
    with pytest.raises(KeyError, match="country"):
        placement_rows(plan, table_shapes(model(ADS), [FlowTTEmbeddingBagCollectionSharder()]))


def test_other_collections_are_planned_too() -> None:
    module = model()
    module.user = EmbeddingBagCollection(
        device="meta",
        tables=[
            EmbeddingBagConfig(
                name="user", num_embeddings=1000, embedding_dim=64, feature_names=["u"]
            )
        ],
    )
    made = planner()
    plan = made.plan(module)
    rows = {(row.module, row.table): row for row in made.placement_rows(plan)}
    assert set(rows) == {("sparse", "ads"), ("sparse", "country"), ("user", "user")}
    assert rows["user", "user"].num_bytes == 1000 * 64 * 4


def test_one_name_in_two_collections() -> None:
    module = model(ADS)
    module.other = EmbeddingBagCollection(
        device="meta",
        tables=[
            EmbeddingBagConfig(
                name="ads", num_embeddings=1000, embedding_dim=64, feature_names=["a"]
            )
        ],
    )
    plan = planner().plan(module)
    assert plan.plan["sparse"]["ads"].compute_kernel == "customized_kernel"
    assert plan.plan["other"]["ads"].compute_kernel != "customized_kernel"


def test_enumerator_must_know_tt_tables() -> None:
    topology = Topology(world_size=2, compute_device="cuda")
    with pytest.raises(TypeError, match="FlowTTEmbeddingEnumerator"):
        FlowTTEmbeddingShardingPlanner(
            topology=topology, enumerator=EmbeddingEnumerator(topology, 64)
        )
    ours = FlowTTEmbeddingEnumerator(topology, 64)
    plan = FlowTTEmbeddingShardingPlanner(topology=topology, enumerator=ours).plan(model())
    assert plan.plan["sparse"]["ads"].compute_kernel == "customized_kernel"


def test_collections_that_would_be_uncompressed_are_refused() -> None:
    module = nn.Module()
    module.sparse = EmbeddingBagCollection(tables=[ADS], device="meta")
    with pytest.raises(ValueError, match="sparse is a plain EmbeddingBagCollection.*ads"):
        planner().plan(module, [EmbeddingBagCollectionSharder()])
    with pytest.raises(ValueError, match="add FlowTTEmbeddingBagCollectionSharder"):
        planner().plan(model(), [EmbeddingBagCollectionSharder()])


def test_torchrecs_planner_is_refused() -> None:
    topology = Topology(world_size=2, compute_device="cuda")
    with pytest.raises(RuntimeError, match="FlowTTEmbeddingShardingPlanner"):
        EmbeddingShardingPlanner(topology=topology).plan(
            model(), [FlowTTEmbeddingBagCollectionSharder()]
        )


@pytest.mark.parametrize(
    ("table", "constraint", "expected"),
    [
        ("ads", ParameterConstraints(compute_kernels=["fused"]), "table_wise, data_parallel"),
        (
            "country",
            ParameterConstraints(
                sharding_types=["table_wise"], compute_kernels=["customized_kernel"]
            ),
            "any compute kernel but 'customized_kernel'",
        ),
    ],
)
def test_constraints_that_leave_no_option(
    table: str, constraint: ParameterConstraints, expected: str
) -> None:
    with pytest.raises(ValueError, match=f"sparse.{table}") as caught:
        planner(constraints={table: constraint}).plan(model())
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("sharding_type", "reason"),
    [
        ("row_wise", "range of rows"),
        ("table_row_wise", "range of rows"),
        ("column_wise", "range of columns"),
        ("grid_shard", "range of columns"),
        ("diagonal", "it is unknown"),
    ],
)
def test_constraints_to_types_a_tt_table_lacks_are_refused_with_the_reason(
    sharding_type: str, reason: str
) -> None:
    constraints = {"ads": ParameterConstraints(sharding_types=[sharding_type])}
    with pytest.raises(ValueError, match=f"'ads' cannot be sharded {sharding_type}: .*{reason}"):
        planner(constraints=constraints).plan(model())


def test_planning_allocates_nothing() -> None:
    config = FlowTTEmbeddingBagConfig(
        name="huge", num_embeddings=10**15, embedding_dim=512, feature_names=["h"], tt_ranks=4
    )
    plan = planner().plan(model(config))
    assert plan.plan["sparse"]["huge"].compute_kernel == "customized_kernel"
    assert torch.empty(0).device.type == "cpu"


def test_costs_are_checked_when_the_planner_is_built() -> None:
    with pytest.raises(TypeError, match="cost must be a TTLookupCost, got int"):
        planner(cost=5)
    with pytest.raises(ValueError, match="calibration is of NVIDIA H200, for cpu devices"):
        planner("cpu", cost=TTLookupCost.default("cuda"))
