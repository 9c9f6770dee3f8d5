"""Collections with TT tables as TorchRec's sharded base classes can read them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_flowtt.distributed.compat import copy_skip_grad_sync
from torchrec_flowtt.distributed.ebc import FlowTTEmbeddingBagCollection
from torchrec_flowtt.distributed.ec import FlowTTEmbeddingCollection
from torchrec_flowtt.distributed.table_parameters import tt_table_parameter


class _SharedTables:
    """Shares the tables of a collection under TorchRec's names.

    The base classes of sharded collections look for ``<tables>.<table>.weight`` of every
    table. Uncompressed tables are the original modules. For a TT table the weight is a meta
    parameter of the table's shape (no memory) that carries the TT shape, beside the original
    cores, whose entries the base class loads when the original has memory.
    """

    def __init__(self, module: Any) -> None:
        """Builds it; see the class for the arguments."""
        super().__init__()
        self._module_device = torch.device(module.device)
        copy_skip_grad_sync(module, cast(nn.Module, self))
        tt_tables = module.tt_tables()
        tables = nn.ModuleDict()
        for name, table in module.table_modules().items():
            if name in tt_tables:
                shown = nn.Module()
                shown.weight = tt_table_parameter(tt_tables[name], module.tt_cores(name))
                shown.tt_cores = table.tt_cores
                tables[name] = shown
            else:
                tables[name] = table
        setattr(self, module.TABLES, tables)

    @property
    def device(self) -> torch.device:
        """The device of the original collection."""
        return self._module_device

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Refuse; the view only describes tables."""
        raise NotImplementedError("a view for sharding describes tables and has no lookup")

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse; the view only describes tables."""
        raise NotImplementedError("a view for sharding describes tables and loads no state")


class ShardingView(_SharedTables, EmbeddingBagCollectionInterface):
    """A :class:`FlowTTEmbeddingBagCollection` as TorchRec's sharded base class reads it.

    Args:
        module: the collection that is being sharded; its tables are shared, not copied.
    """

    def __init__(self, module: FlowTTEmbeddingBagCollection) -> None:
        """Builds it; see the class for the arguments."""
        super().__init__(module)
        self._configs: list[EmbeddingBagConfig] = module.embedding_bag_configs()
        self._weighted: bool = module.is_weighted()

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configurations of all tables."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether the input carries per-sample weights."""
        return self._weighted


class SequenceShardingView(_SharedTables, EmbeddingCollectionInterface):
    """A :class:`FlowTTEmbeddingCollection` as TorchRec's sharded base class reads it.

    Args:
        module: the collection that is being sharded; its tables are shared, not copied.
    """

    def __init__(self, module: FlowTTEmbeddingCollection) -> None:
        """Builds it; see the class for the arguments."""
        super().__init__(module)
        self._configs: list[EmbeddingConfig] = module.embedding_configs()
        self._names_by_table: list[list[str]] = module.embedding_names_by_table()
        self._dim: int = module.embedding_dim()
        self._indices: bool = module.need_indices()
        self._gather_select: bool = module.use_gather_select()
        # TorchRec 1.8 has added this.
        self._gather_select_per_sharding: Any = getattr(
            module, "use_gather_select_per_sharding", lambda: None
        )()
        # TorchRec 1.9 has added this.
        self._sorted_select: bool = getattr(module, "use_sorted_select", lambda: False)()

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Configurations of all tables."""
        return self._configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """Names of the output's entries, table after table."""
        return self._names_by_table

    def embedding_dim(self) -> int:
        """D."""
        return self._dim

    def need_indices(self) -> bool:
        """Whether the output has the ids."""
        return self._indices

    def use_gather_select(self) -> bool:
        """Whether repeated ids are restored with ``torch.gather``."""
        return self._gather_select

    def use_gather_select_per_sharding(self) -> dict[str, bool] | None:
        """The same by sharding type, where it differs."""
        per_sharding: dict[str, bool] | None = self._gather_select_per_sharding
        return per_sharding

    def use_sorted_select(self) -> bool:
        """Whether gradients of repeated ids are summed in ascending order of the ids."""
        return self._sorted_select
