"""Small models of sequence embeddings, and a float64 reference of their training.

The reference holds every table whole on one process in float64, reconstructs the TT tables by
:func:`torchrec_flowtt.functional.to_dense`, and trains with torch's own optimizers on the mean of
the ranks' losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tests.distributed.sharded_models import PLACEMENTS, Reference, Table
from torchrec_flowtt.distributed import (
    FlowTTEmbeddingCollection,
    FlowTTEmbeddingCollectionSharder,
    FlowTTEmbeddingConfig,
)
from torchrec_flowtt.distributed.module_plan import construct_module_sharding_plan


@dataclass
class SequenceTable(Table):
    """One table of sequence embeddings."""

    def config(self) -> EmbeddingConfig:
        """TorchRec's configuration of the table."""
        common = {
            "name": self.name,
            "num_embeddings": self.rows,
            "embedding_dim": self.dim,
            "feature_names": list(self.features),
        }
        if self.tt:
            return FlowTTEmbeddingConfig(**common, tt_ranks=self.ranks)
        return EmbeddingConfig(**common)


TABLES = [
    SequenceTable("tt_a", "tw0", ["a", "shared"], rows=60),
    SequenceTable("tt_b", "tw1", ["b"], rows=47, ranks=(4, 3)),
    SequenceTable("tt_e", "tw0", ["h"], rows=30),
    SequenceTable("tt_c", "dp", ["c", "shared"], rows=40, ranks=(2,)),
    SequenceTable("fb_tw", "tw0", ["d"], tt=False),
    SequenceTable("fb_rw", "rw", ["e"], tt=False),
    SequenceTable("fb_cw", "cw", ["f"], tt=False),
    # None is data-parallel: FBGEMM's kernel for it pools on the CPU, whatever the pooling mode.
]


class SequenceModel(nn.Module):
    """A collection under the name a user would give it."""

    def __init__(self, tables: Sequence[SequenceTable], **kwargs: object) -> None:
        super().__init__()
        self.sequence = FlowTTEmbeddingCollection(
            tables=[table.config() for table in tables], **{"device": "meta", **kwargs}
        )

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        return self.sequence(features)


def plan_for(model: SequenceModel, tables: Sequence[SequenceTable]) -> ShardingPlan:
    """The plan that puts each table where it says."""
    module_plan = construct_module_sharding_plan(
        model.sequence, {t.name: PLACEMENTS[t.place] for t in tables}, device_type="cpu"
    )
    for table in tables:
        if not table.tt and table.place != "dp":
            # TorchRec's generators choose "dense" unless apply_optimizer_in_backward was called.
            module_plan[table.name].compute_kernel = "fused"
    return ShardingPlan({"sequence": module_plan})


def shard(
    tables: Sequence[SequenceTable],
    fused_params: dict | None = None,
    plan: ShardingPlan | None = None,
    env: object = None,
    **kwargs: object,
) -> DistributedModelParallel:
    """A sharded model of `tables`."""
    model = SequenceModel(tables, **kwargs)
    return DistributedModelParallel(
        model,
        env=env,
        device=torch.device("cpu"),
        plan=plan_for(model, tables) if plan is None else plan,
        sharders=[FlowTTEmbeddingCollectionSharder(fused_params)],
    )


class SequenceReference(Reference):
    """All tables, whole and in float64."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parameters = {
            key.replace("sparse.embedding_bags.", "sequence.embeddings."): value
            for key, value in self.parameters.items()
        }

    def rows(self, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        """The rows of each entry of the output, [L, D]."""
        values = dict(zip(features.keys(), self._values(features), strict=True))
        of_entry = zip(self.names(), [(t, f) for t in self.tables for f in t.features], strict=True)
        return {name: self.weight(table)[values[feature]] for name, (table, feature) in of_entry}

    def weight(self, table: Table) -> Tensor:
        """The table, [N, D]."""
        found = self.parameters
        self.parameters = {
            key.replace("sequence.embeddings.", "sparse.embedding_bags."): value
            for key, value in found.items()
        }
        try:
            return super().weight(table)
        finally:
            self.parameters = found

    @staticmethod
    def _values(features: KeyedJaggedTensor) -> list[Tensor]:
        lengths = features.lengths().reshape(len(features.keys()), -1)
        return list(features.values().split(lengths.sum(1).tolist()))
