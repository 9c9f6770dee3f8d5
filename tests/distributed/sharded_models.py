"""Small models with TT and FBGEMM tables, and a float64 reference of their training.

The reference holds every table whole on one process in float64, reconstructs the TT tables by
:func:`torchrec_flowtt.functional.to_dense`, and trains with torch's own optimizers on the mean of
the ranks' losses. It shares no code with the lookups, kernels and optimizers under test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import Topology
from torchrec.distributed.sharding_plan import (
    column_wise,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_flowtt.distributed import (
    FlowTTEmbeddingBagCollection,
    FlowTTEmbeddingBagCollectionSharder,
    FlowTTEmbeddingBagConfig,
)
from torchrec_flowtt.distributed.module_plan import construct_module_sharding_plan
from torchrec_flowtt.functional import to_dense

PLACEMENTS = {
    "tw0": table_wise(rank=0),
    "tw1": table_wise(rank=1),
    "tw3": table_wise(rank=3),
    "rw": row_wise(),
    "cw": column_wise(ranks=[0, 1]),
    "dp": data_parallel(),
}


@dataclass
class Table:
    """One table of a test model: a name, where it is put, and what it looks like."""

    name: str
    place: str
    features: Sequence[str]
    tt: bool = True
    rows: int = 50
    dim: int = 8
    mean: bool = False
    ranks: tuple[int, ...] = (3, 2)

    def config(self) -> EmbeddingBagConfig:
        """TorchRec's configuration of the table."""
        common = {
            "name": self.name,
            "num_embeddings": self.rows,
            "embedding_dim": self.dim,
            "feature_names": list(self.features),
            "pooling": PoolingType.MEAN if self.mean else PoolingType.SUM,
        }
        if self.tt:
            return FlowTTEmbeddingBagConfig(**common, tt_ranks=self.ranks)
        return EmbeddingBagConfig(**common)


class Model(nn.Module):
    """A collection under the name a user would give it."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.sparse = ebc

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.sparse(features).values()


def tt_and_fbgemm_tables(mean: bool = False) -> list[Table]:
    """TT tables table-wise on both ranks and data-parallel, beside FBGEMM tables of all kinds."""
    return [
        Table("tt_a", "tw0", ["a", "shared"], rows=60, dim=8),
        Table("tt_b", "tw1", ["b"], rows=47, dim=12, ranks=(4, 3), mean=mean),
        Table("tt_c", "dp", ["c", "shared"], rows=40, dim=16, ranks=(2,)),
        Table("fb_tw", "tw0", ["d"], tt=False, mean=mean),
        Table("fb_rw", "rw", ["e"], tt=False),
        Table("fb_cw", "cw", ["f"], tt=False, dim=16),
        Table("fb_dp", "dp", ["g"], tt=False),
    ]


def features_of(tables: Sequence[Table]) -> list[str]:
    """All features, each once."""
    return list(dict.fromkeys(f for table in tables for f in table.features))


def plan_for(model: nn.Module, tables: Sequence[Table]) -> ShardingPlan:
    """The plan that puts each table where it says."""
    sharder = FlowTTEmbeddingBagCollectionSharder()
    module_plan = construct_module_sharding_plan(
        model.sparse, {t.name: PLACEMENTS[t.place] for t in tables}, sharder, device_type="cpu"
    )
    for table in tables:
        if not table.tt and table.place != "dp":
            # TorchRec's generators choose "dense" unless apply_optimizer_in_backward was called.
            module_plan[table.name].compute_kernel = "fused"
    return ShardingPlan({"sparse": module_plan})


def shard(
    tables: Sequence[Table],
    fused_params: dict | None = None,
    weighted: bool = False,
    plan: ShardingPlan | None = None,
    env: ShardingEnv | None = None,
    qcomm_codecs_registry: dict | None = None,
) -> DistributedModelParallel:
    """A sharded model of `tables`."""
    model = Model(
        FlowTTEmbeddingBagCollection(
            tables=[t.config() for t in tables], is_weighted=weighted, device="meta"
        )
    )
    return DistributedModelParallel(
        model,
        env=env,
        device=torch.device("cpu"),
        plan=plan_for(model, tables) if plan is None else plan,
        sharders=[FlowTTEmbeddingBagCollectionSharder(fused_params, qcomm_codecs_registry)],
    )


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters a user's dense optimizer trains: those without one in backward."""
    return [p for _, p in in_backward_optimizer_filter(model.named_parameters())]


def batch(
    tables: Sequence[Table], rank: int, step: int, size: int = 6, weighted: bool = False
) -> KeyedJaggedTensor:
    """A batch of a rank and step, with empty bags and repeated ids."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    rows = {}
    for table in tables:
        for feature in table.features:
            rows[feature] = min(rows.get(feature, table.rows), table.rows)
    lengths = torch.randint(0, 5, (len(rows) * size,), generator=generator)
    values = []
    for f, limit in enumerate(rows.values()):
        count = int(lengths[f * size : (f + 1) * size].sum())
        values.append(torch.randint(0, limit, (count,), generator=generator))
    flat = torch.cat(values)
    weights = torch.rand(flat.numel(), generator=generator) + 0.5 if weighted else None
    return KeyedJaggedTensor(keys=list(rows), values=flat, lengths=lengths, weights=weights)


def variable_batch(
    tables: Sequence[Table], rank: int, step: int, size: int = 6
) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """A batch whose features differ in their number of bags, and the same batch with all bags."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    limits = {feature: table.rows for table in tables for feature in table.features}
    bags, lengths, chosen = [], [], []
    for limit in limits.values():
        count = int(torch.randint(1, size + 1, (1,), generator=generator))
        lengths.append(torch.randint(0, 4, (count,), generator=generator))
        values = torch.randint(0, limit, (int(lengths[-1].sum()),), generator=generator)
        bags.append(values.split(lengths[-1].tolist()))
        chosen.append(torch.randint(0, count, (size,), generator=generator))
    keys = list(limits)
    deduplicated = KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([bag for feature in bags for bag in feature]),
        lengths=torch.cat(lengths),
        stride_per_key_per_rank=[[length.numel()] for length in lengths],
        inverse_indices=(keys, torch.stack(chosen)),
    )
    everything = KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([f[b] for f, c in zip(bags, chosen, strict=True) for b in c.tolist()]),
        lengths=torch.cat([n[c] for n, c in zip(lengths, chosen, strict=True)]),
    )
    return deduplicated, everything


def target(output: Tensor, step: int) -> Tensor:
    """A loss whose gradient differs from one element to the next."""
    wave = torch.arange(output.numel(), dtype=output.dtype).reshape(output.shape) + step
    return ((output - torch.sin(wave)) ** 2).sum() / 10


ADAGRAD = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.05, "eps": 1e-6}

TABLES = [
    Table("tt_a", "tw0", ["a", "b"], rows=60),
    Table("tt_b", "tw1", ["c"], rows=40, dim=12),
    Table("tt_c", "dp", ["d"], rows=40),
    Table("fb_tw", "tw1", ["e"], tt=False),
    Table("fb_dp", "dp", ["f"], tt=False),
]


def unsharded(tables: list[Table] = TABLES, device: str = "meta") -> Model:
    """A model that is not sharded yet."""
    configs = [table.config() for table in tables]
    return Model(FlowTTEmbeddingBagCollection(tables=configs, device=device))


def topology() -> Topology:
    """Two ranks on the CPU."""
    return Topology(world_size=2, local_world_size=2, compute_device="cpu")


def sharders() -> list:
    """All sharders, with Adagrad for the tables of a collection."""
    return [FlowTTEmbeddingBagCollectionSharder(fused_params=ADAGRAD), *get_default_sharders()]


@dataclass
class Reference:
    """All tables, whole and in float64."""

    tables: Sequence[Table]
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        for table in self.tables:
            shapes = (
                {f"tt_cores.{k}": s for k, s in enumerate(table.config().tt_spec.core_shapes)}
                if table.tt
                else {"weight": (table.rows, table.dim)}
            )
            for name, shape in shapes.items():
                value = torch.randn(shape, generator=generator).double() * 0.6
                key = f"sparse.embedding_bags.{table.name}.{name}"
                self.parameters[key] = value.requires_grad_()

    def state_dict(self) -> dict[str, Tensor]:
        """The parameters in float32, under the keys of the model."""
        return {key: value.detach().float() for key, value in self.parameters.items()}

    def weight(self, table: Table) -> Tensor:
        """The table, [N, D]."""
        prefix = f"sparse.embedding_bags.{table.name}."
        if not table.tt:
            return self.parameters[prefix + "weight"]
        spec = table.config().tt_spec
        cores = [self.parameters[f"{prefix}tt_cores.{k}"] for k in range(spec.num_cores)]
        return to_dense(cores, table.rows)

    def output(self, features: KeyedJaggedTensor) -> Tensor:
        """The pooled embeddings, [B, sum D], in the order of an unsharded collection."""
        keys, size = features.keys(), features.stride()
        ends = features.lengths().cumsum(0).tolist()
        bounds = [0, *ends]
        columns = []
        for table in self.tables:
            weight = self.weight(table)
            for feature in table.features:
                first = keys.index(feature) * size
                bags = [
                    _pool(weight, features, bounds[b], bounds[b + 1], table.mean)
                    for b in range(first, first + size)
                ]
                columns.append(torch.stack(bags) if bags else weight.new_zeros(0, table.dim))
        return torch.cat(columns, dim=1)

    def names(self) -> list[str]:
        """Names of the output's parts, in order."""
        counts: dict[str, int] = {}
        for table in self.tables:
            for feature in table.features:
                counts[feature] = counts.get(feature, 0) + 1
        return [
            f"{feature}@{table.name}" if counts[feature] > 1 else feature
            for table in self.tables
            for feature in table.features
        ]


def _pool(weight: Tensor, features: KeyedJaggedTensor, start: int, end: int, mean: bool) -> Tensor:
    rows = weight[features.values()[start:end]]
    weights = features.weights_or_none()
    if weights is not None:
        rows = rows * weights[start:end].double().unsqueeze(1)
    pooled = rows.sum(0)
    return pooled / (end - start) if mean and end > start else pooled
