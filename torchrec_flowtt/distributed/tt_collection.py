"""What the unsharded collections with TT tables share, pooled and sequence."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_flowtt.distributed.batch_forms import for_lookup
from torchrec_flowtt.distributed.batch_requirements import BatchRequirements
from torchrec_flowtt.distributed.embedding_configs import TTTableConfig
from torchrec_flowtt.modules import FlowTTEmbedding, FlowTTEmbeddingBag
from torchrec_flowtt.modules.lookup_errors import NAMED_ERRORS


class TTTableCollection:
    """TT tables of a collection of TorchRec, its other base class.

    Attributes:
        TABLES: name of the attribute that holds the tables, as in state dicts.
    """

    TABLES: ClassVar[str]

    _batch_requirements: BatchRequirements
    device: torch.device

    def table_configs(self) -> list[Any]:
        """Configurations of all tables, in order."""
        return configs_of(cast(nn.Module, self))

    def table_modules(self) -> nn.ModuleDict:
        """The tables' modules by table name."""
        return cast(nn.ModuleDict, getattr(self, self.TABLES))

    def forward(self, features: KeyedJaggedTensor) -> Any:
        """Embeddings of all features; see the class for shapes.

        On the CPU errors name the feature and the table, those of uncompressed tables too.

        Raises:
            KeyError: a feature is not among the keys.
            IndexError: an id is outside its TT table.
            TypeError, ValueError, RuntimeError: something else is wrong with the batch.
        """
        if isinstance(features, KeyedJaggedTensor):
            self._batch_requirements.check_form(features)
            features = for_lookup(features, bool(self._batch_requirements.is_weighted))
        try:
            if isinstance(features, KeyedJaggedTensor):
                self._batch_requirements.check_lengths(features)
            return super().forward(features)  # type: ignore[misc]
        except Exception as error:
            self._batch_requirements.explain(features, error)
            if isinstance(features, KeyedJaggedTensor) and features.values().device.type == "cpu":
                self._raise_with_feature(features)
            raise

    @torch.no_grad()
    def _raise_with_feature(self, features: KeyedJaggedTensor) -> None:
        """Repeats the lookups of a batch, and raises the error of the first that fails."""
        jagged = features.to_dict()
        for config in self.table_configs():
            for name in config.feature_names:
                try:
                    self._look_up(config.name, jagged[name])
                except (*NAMED_ERRORS, RuntimeError) as error:
                    # The lookup in a TT table has named the table itself.
                    is_tt = isinstance(config, TTTableConfig)
                    label = f"feature {name!r}" + ("" if is_tt else f", table {config.name!r}")
                    kind = next(k for k in (*NAMED_ERRORS, RuntimeError) if isinstance(error, k))
                    raise kind(f"{label}: {error}") from error

    def _look_up(self, table: str, feature: JaggedTensor) -> torch.Tensor:
        """Looks up one feature in one table."""
        raise NotImplementedError

    def tt_tables(self) -> dict[str, Any]:
        """Configurations of the TT tables by table name."""
        return {
            config.name: config
            for config in self.table_configs()
            if isinstance(config, TTTableConfig)
        }

    def _tt_module(self, table: str) -> FlowTTEmbeddingBag | FlowTTEmbedding:
        return cast("FlowTTEmbeddingBag | FlowTTEmbedding", self.table_modules()[table])

    def tt_cores(self, table: str) -> list[nn.Parameter]:
        """The TT-cores of a table, core k of shape ``[p_k, r_(k-1), q_k, r_k]``.

        Raises:
            KeyError: if there is no TT table of that name.
        """
        if table not in self.tt_tables():
            raise KeyError(f"no TT table {table!r}; TT tables are {sorted(self.tt_tables())}")
        return list(self._tt_module(table).tt_cores)

    def keep_packed_cores(self, keep: bool = True) -> None:
        """Keeps packed copies of the TT-cores between lookups without a gradient; off at first.

        Of all TT tables; see :class:`~torchrec_flowtt.modules.packed_cores.KeepsPackedCores`. A
        sharded collection has this method too, and starts without copies.
        """
        for table in self.tt_tables():
            self._tt_module(table).keep_packed_cores(keep)

    def refresh_packed_cores(self) -> None:
        """Packs the TT-cores again, in place; after changes through ``.data``, for example."""
        for table in self.tt_tables():
            self._tt_module(table).refresh_packed_cores()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise every table by its configuration; does nothing on the meta device."""
        if torch.device(self.device).type == "meta":
            return
        tt_tables = self.tt_tables()
        for config in self.table_configs():
            if config.name in tt_tables:
                self._tt_module(config.name).reset_parameters()
            else:
                config.init_fn(self.table_modules()[config.name].weight)


def configs_of(module: nn.Module) -> list[Any]:
    """Configurations of a collection's tables; of no tables if `module` is no collection."""
    if isinstance(module, EmbeddingBagCollection):
        return list(module.embedding_bag_configs())
    if isinstance(module, EmbeddingCollection):
        return list(module.embedding_configs())
    return []


def has_tt_tables(model: nn.Module) -> bool:
    """Whether a collection somewhere in `model` has TT tables."""
    return any(
        isinstance(config, TTTableConfig)
        for module in model.modules()
        for config in configs_of(module)
    )
