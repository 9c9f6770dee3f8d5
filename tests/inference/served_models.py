"""A small collection with TT and uncompressed tables, batches for it, and its float64 reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from tests import reference
from torchrec_flowtt.distributed import FlowTTEmbeddingBagCollection, FlowTTEmbeddingBagConfig

ROWS = 60
RANGE = {"weight_init_min": -1.0, "weight_init_max": 1.0}
KEYS = ["e", "s", "a", "unused", "b", "c", "d", "g"]
LONGEST_BAG = 4


def tt_table(name: str, features: list[str], dim: int = 8, **fields: Any) -> EmbeddingBagConfig:
    """A TT table of :data:`ROWS` rows."""
    return FlowTTEmbeddingBagConfig(
        name=name,
        num_embeddings=ROWS,
        embedding_dim=dim,
        feature_names=features,
        tt_ranks=3,
        **{**RANGE, **fields},
    )


def fb_table(name: str, features: list[str], dim: int = 8, **fields: Any) -> EmbeddingBagConfig:
    """An uncompressed table of :data:`ROWS` rows."""
    return EmbeddingBagConfig(
        name=name,
        num_embeddings=ROWS,
        embedding_dim=dim,
        feature_names=features,
        **{**RANGE, **fields},
    )


def mixed_tables(weighted: bool = False) -> list[EmbeddingBagConfig]:
    """Both kinds in both poolings, in turns, with features that tables of either kind share.

    But for weighted uncompressed tables, which torch cannot pool by mean.
    """
    mean = {"pooling": PoolingType.MEAN}
    return [
        fb_table("fb_0", ["a", "s"]),
        tt_table("tt_0", ["b", "s"]),
        tt_table("tt_1", ["c"], 12, **mean),
        fb_table("fb_1", ["d"], **({} if weighted else mean)),
        tt_table("tt_2", ["e"], 16),
        fb_table("fb_2", ["g", "a"], 4),
    ]


class Model(nn.Module):
    """A collection under the name a user would give it."""

    def __init__(self, ebc: nn.Module) -> None:
        super().__init__()
        self.sparse = ebc

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """The collection's output."""
        return self.sparse(features)


def collection(
    tables: list[EmbeddingBagConfig], weighted: bool = False, **kwargs: Any
) -> FlowTTEmbeddingBagCollection:
    """A collection with the same parameters at every call."""
    torch.manual_seed(7)
    return FlowTTEmbeddingBagCollection(tables=tables, is_weighted=weighted, **kwargs)


def batch(
    size: int,
    longest: int = LONGEST_BAG,
    keys: list[str] = KEYS,
    weighted: bool = False,
    dtype: torch.dtype = torch.int64,
) -> KeyedJaggedTensor:
    """Random bags of up to `longest` ids, empty ones among them."""
    generator = torch.Generator().manual_seed(size)
    lengths = torch.randint(0, longest + 1, (len(keys) * size,), generator=generator)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator).to(dtype)
    weights = torch.rand(values.numel(), generator=generator) + 0.5 if weighted else None
    return KeyedJaggedTensor(keys=keys, values=values, weights=weights, lengths=lengths)


def tt_expected(
    config: EmbeddingBagConfig, cores: list[Tensor], features: KeyedJaggedTensor, name: str
) -> Tensor:
    """Pooled embeddings of one feature of a TT table, ``[B, D]`` in float64."""
    bags = features[name]
    pooling = reference.MEAN if config.pooling is PoolingType.MEAN else reference.SUM
    call = reference.Bags(
        bags.values(),
        bags.offsets(),
        bags.weights_or_none(),
        [len(cores)],
        [ROWS],
        [0],
        pooling,
    )
    return reference.embedding_bag(cores, call)
