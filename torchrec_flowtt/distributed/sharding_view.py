"""A collection with TT tables as TorchRec's sharded base class can read it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_flowtt.distributed.compat import copy_skip_grad_sync
from torchrec_flowtt.distributed.ebc import FlowTTEmbeddingBagCollection
from torchrec_flowtt.distributed.table_parameters import tt_table_parameter


class ShardingView(EmbeddingBagCollectionInterface):
    """Shares the tables of a :class:`FlowTTEmbeddingBagCollection` under TorchRec's names.

    The base class of sharded collections looks for ``embedding_bags.<table>.weight`` of every
    table. Uncompressed tables are the original modules. For a TT table the weight is a meta
    parameter of the table's shape (no memory) that carries the TT shape, beside the original
    cores, whose entries the base class loads when the original is on an accelerator.

    Args:
        module: the collection that is being sharded; its tables are shared, not copied.
    """

    def __init__(self, module: FlowTTEmbeddingBagCollection) -> None:
        """Builds it; see the class for the arguments."""
        super().__init__()
        self._configs: list[EmbeddingBagConfig] = module.embedding_bag_configs()
        self._weighted: bool = module.is_weighted()
        self._module_device = torch.device(module.device)
        copy_skip_grad_sync(module, self)
        tt_tables = module.tt_tables()
        self.embedding_bags = nn.ModuleDict()
        for name, bag in module.embedding_bags.items():
            if name in tt_tables:
                table = nn.Module()
                table.weight = tt_table_parameter(tt_tables[name], module.tt_cores(name))
                table.tt_cores = bag.tt_cores
                self.embedding_bags[name] = table
            else:
                self.embedding_bags[name] = bag

    @property
    def device(self) -> torch.device:
        """The device of the original collection."""
        return self._module_device

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Refuse; the view only describes tables."""
        raise NotImplementedError("a ShardingView describes tables and has no lookup")

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configurations of all tables."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether the input carries per-sample weights."""
        return self._weighted

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse; the view only describes tables."""
        raise NotImplementedError("a ShardingView describes tables and loads no state")
