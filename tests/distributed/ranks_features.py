"""Checks of TorchRec's features around TT tables; run by test_features.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.ranks_refusals import refused
from tests.distributed.ranks_training import whole
from tests.distributed.sharded_models import (
    ADAGRAD,
    Model,
    Table,
    batch,
    dense_parameters,
    features_of,
    plan_for,
    target,
    topology,
)
from tests.distributed.torchrun_launcher import run_on_rank
from torchrec_flowtt.distributed import (
    FlowTTEmbeddingBagCollection,
    FlowTTEmbeddingBagCollectionSharder,
    FlowTTFeatureProcessedEmbeddingBagCollectionSharder,
)
from torchrec_flowtt.planner import FlowTTEmbeddingShardingPlanner

TABLES = [
    Table("tt_a", "tw0", ["a", "b"], rows=60),
    Table("tt_b", "tw1", ["c"], rows=40, dim=12),
    Table("tt_c", "dp", ["d"], rows=40),
    Table("fb_tw", "tw1", ["e"], tt=False),
    Table("fb_dp", "dp", ["f"], tt=False),
    Table("fb_rw", "rw", ["g"], tt=False),
]
PREFIX = "sparse._embedding_bag_collection."
POSITIONS = "sparse._feature_processors.position_weights."


class ByFeature(nn.Module):
    """A collection and an order of its features; a forward that DDP sees."""

    def __init__(self, sparse: nn.Module, order: list[str]) -> None:
        super().__init__()
        self.sparse, self.order = sparse, order

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = self.sparse(features)
        return torch.cat([pooled[name] for name in self.order], dim=1)


def collection(tables: list[Table], weighted: bool, device: str) -> FlowTTEmbeddingBagCollection:
    configs = [table.config() for table in tables]
    return FlowTTEmbeddingBagCollection(tables=configs, is_weighted=weighted, device=device)


def feature_processed(tables: list[Table], device: str = "meta") -> ByFeature:
    names = features_of(tables)
    processor = PositionWeightedModuleCollection({name: 8 for name in names})
    inner = collection(tables, True, device)
    return ByFeature(FeatureProcessedEmbeddingBagCollection(inner, processor), names)


def processed_sharders() -> list:
    collections = FlowTTEmbeddingBagCollectionSharder(fused_params=ADAGRAD)
    return [
        collections,
        *get_default_sharders(),
        FlowTTFeatureProcessedEmbeddingBagCollectionSharder(collections),
    ]


def start_of(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        key: torch.randn(value.shape, generator=generator) * 0.4 + 0.5
        for key, value in sorted(model.state_dict().items())
    }


def feature_processors() -> None:
    train_feature_processors(TABLES)


def feature_processors_without_row_wise() -> None:
    """Then the weights by position are made after the exchange, not before it."""
    train_feature_processors([table for table in TABLES if table.place != "rw"])


def train_feature_processors(tables: list[Table]) -> None:
    """Training equals that of the unsharded model, of the weights by position too."""
    alone = feature_processed(tables, "cpu")
    inner = Model(collection(tables, True, "meta"))
    hand_made = ShardingPlan({"sparse": plan_for(inner, tables).plan["sparse"]})
    start = start_of(alone)
    alone.load_state_dict(start)
    model = DistributedModelParallel(
        feature_processed(tables),
        device=torch.device("cpu"),
        plan=hand_made,
        sharders=processed_sharders(),
    )
    assert set(model.state_dict()) == set(start), set(model.state_dict()) ^ set(start)
    model.load_state_dict(start)

    dense = torch.optim.Adagrad(dense_parameters(model), lr=0.05, eps=1e-6)
    trainer = torch.optim.Adagrad(alone.parameters(), lr=0.05, eps=1e-6)
    for step in range(4):
        batches = [batch(tables, rank, step) for rank in range(2)]
        trainer.zero_grad()
        outputs = [alone(features) for features in batches]
        (sum(target(output, step) for output in outputs) / 2).backward()
        output = model(batch(tables, dist.get_rank(), step))
        torch.testing.assert_close(output, outputs[dist.get_rank()].detach(), rtol=2e-5, atol=2e-5)
        dense.zero_grad()
        target(output, step).backward()
        trainer.step()
        dense.step()
    for key, value in model.state_dict().items():
        found = whole(value)
        if found is not None:
            torch.testing.assert_close(
                found,
                alone.state_dict()[key],
                rtol=2e-4,
                atol=2e-4,
                msg=lambda t, k=key: f"{k}: {t}",
            )
    for name in features_of(tables):
        key = POSITIONS + name
        assert not torch.allclose(alone.get_parameter(key), torch.ones(8), atol=1e-3), key


def feature_processors_planned() -> None:
    tables = TABLES
    model = feature_processed(tables)
    planner = FlowTTEmbeddingShardingPlanner(topology=topology(), batch_size=6)
    plan = planner.collective_plan(model, processed_sharders())
    rows = {row.table: row.kernel for row in planner.placement_rows(plan)}
    assert {table for table, kernel in rows.items() if kernel == "flowtt"} == {
        table.name for table in tables if table.tt
    }, rows
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=processed_sharders()
    )
    alone = feature_processed(tables, "cpu")
    start = start_of(alone)
    alone.load_state_dict(start)
    sharded.load_state_dict(start)
    features = [batch(tables, dist.get_rank(), 0) for _ in range(2)]
    torch.testing.assert_close(sharded(features[0]), alone(features[1]))


def feature_processors_refused() -> None:
    planner = FlowTTEmbeddingShardingPlanner(topology=topology(), batch_size=6)
    refused(ValueError, "FlowTTFeatureProcessedEmbeddingBagCollectionSharder")(
        lambda: planner.collective_plan(feature_processed(TABLES), processed_sharders()[:-1])
    )
    refused(RuntimeError, "FlowTTEmbeddingShardingPlanner")(
        lambda: DistributedModelParallel(
            feature_processed(TABLES), sharders=processed_sharders()[-1:]
        )
    )


def managed_collisions() -> None:
    """Unsharded, ids are remapped before the lookup; sharded, TT tables are refused."""
    tables = [Table("tt_a", "tw0", ["a"], rows=40), Table("fb", "tw0", ["b"], rows=40, tt=False)]

    def managed(device: str) -> Model:
        inner = collection(tables, False, device)
        configs = inner.embedding_bag_configs()
        modules = {
            config.name: MCHManagedCollisionModule(
                zch_size=40,
                device=torch.device("cpu"),
                eviction_interval=1,
                eviction_policy=DistanceLFU_EvictionPolicy(),
            )
            for config in configs
        }
        return Model(
            ManagedCollisionEmbeddingBagCollection(
                inner,
                ManagedCollisionCollection(modules, configs),
                return_remapped_features=True,
            )
        )

    alone = managed("cpu")
    features = batch(tables, 0, 0)
    features._values = features.values() + 10**6
    for _ in range(3):
        pooled, remapped = alone.sparse(features)
    assert remapped.values().max() < 40
    plain = alone.sparse._embedding_module(remapped)
    torch.testing.assert_close(pooled.values(), plain.values())

    sharder = FlowTTEmbeddingBagCollectionSharder(fused_params=ADAGRAD)
    sharders = [sharder, ManagedCollisionEmbeddingBagCollectionSharder(sharder)]
    planner = FlowTTEmbeddingShardingPlanner(topology=topology(), batch_size=6)
    refused(ValueError, "managed collisions row_wise only")(
        lambda: planner.collective_plan(managed("meta"), sharders)
    )


if __name__ == "__main__":
    run_on_rank(
        {
            check.__name__: check
            for check in (
                feature_processors,
                feature_processors_without_row_wise,
                feature_processors_planned,
                feature_processors_refused,
                managed_collisions,
            )
        }
    )
