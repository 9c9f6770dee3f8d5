"""The collection for inference: uncompressed tables quantised, TT tables as they are."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import (
    EmbeddingBagConfig,
    dtype_to_data_type,
    pooling_type_to_str,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    get_embedding_names_by_table,
)
from torchrec.quant import embedding_modules as quant
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_flowtt.distributed import FlowTTEmbeddingBagCollection, FlowTTEmbeddingBagConfig
from torchrec_flowtt.distributed.batch_forms import for_exchange
from torchrec_flowtt.distributed.batch_requirements import BatchRequirements
from torchrec_flowtt.inference.core_precision import converted_core, core_dtype, output_dtype
from torchrec_flowtt.modules import OptimType, TableBatchedFlowTTEmbeddingBags

__all__ = ["QuantFlowTTEmbeddingBagCollection"]

_PRUNED_ROWS = quant.MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT
# What TorchRec's quantisation asks of a float collection besides `qconfig`.
_SETTINGS = (
    quant.MODULE_ATTR_REGISTER_TBES_BOOL,
    quant.MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
    quant.MODULE_ATTR_ROW_ALIGNMENT_INT,
    _PRUNED_ROWS,
    quant.MODULE_ATTR_CACHE_FEATURES_ORDER,
)


class QuantFlowTTEmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """A :class:`FlowTTEmbeddingBagCollection` for inference, as TorchRec quantises one.

    The uncompressed tables become TorchRec's quantised collection, the child `uncompressed`, which
    ``shard_quant_model`` finds and shards. TT-cores keep a floating-point dtype, since there are no
    kernels for integer ones and cores are small; tables of one pooling and dtype are looked up in
    one call. ``shard_quant_model`` leaves them where they are: every copy of the model holds them.

    Keys and columns of the output stand in the order of TorchRec's quantised collection: tables
    that pool as the first one does, then those of the next pooling type, each in the order of the
    configurations. That order is kept when `uncompressed` is sharded.

    Build it with :meth:`from_float`, which ``quantize_inference_model`` calls; it takes the mapping
    from :func:`~torchrec_flowtt.inference.flowtt_quantization_mapping`.

    Args:
        tables: configurations of all tables.
        is_weighted: whether the input carries per-sample weights.
        uncompressed: the quantised collection of the uncompressed tables; None if all are TT.
        tt_cores: cores of each TT table by name, of one dtype a table: float32, float16, bfloat16.
        output_dtype: dtype of the embeddings: float32, float16 or bfloat16.

    Attributes:
        uncompressed: quantised collection, or the sharded one that took its place, or None.
        tt_groups: TT tables of one pooling and dtype, by these; keys of the state dict are
            ``tt_groups.<pooling>_<dtype>.tt_cores.<k>``.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool,
        uncompressed: nn.Module | None,
        tt_cores: dict[str, list[Tensor]],
        output_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Builds it; see the class for the arguments."""
        super().__init__()
        self._embedding_bag_configs = tables
        self._is_weighted = is_weighted
        self._output_dtype = output_dtype
        self._batch_requirements = BatchRequirements(tables, is_weighted)
        self.uncompressed = uncompressed
        self.tt_groups = nn.ModuleDict()

        dense = [table for table in tables if table.name not in tt_cores]
        groups: dict[str, list[EmbeddingBagConfig]] = {}
        for table in tables:
            if table.name in tt_cores:
                dtype = str(tt_cores[table.name][0].dtype).removeprefix("torch.")
                key = f"{pooling_type_to_str(table.pooling)}_{dtype}"
                groups.setdefault(key, []).append(table)
        for key, members in groups.items():
            cores = [tt_cores[table.name] for table in members]
            self.tt_groups[key] = _tt_group(members, cores, output_dtype)
        self._tt_tables = {key: [t.name for t in members] for key, members in groups.items()}

        # A feature comes once for all uncompressed tables, as their collection sees to the rest.
        names = dict.fromkeys(name for table in dense for name in table.feature_names)
        self._features = [list(names)] if dense else []
        self._features += [_features(members) for members in groups.values()]

        # Names of a part of the tables may lack the "@table" that tells shared features apart.
        ordered = _by_pooling(tables)
        self._embedding_names = _embedding_names(ordered)
        self._length_per_key = [t.embedding_dim for t in ordered for _ in t.feature_names]
        own_names = dict(zip(_pairs(dense), _embedding_names(dense), strict=True))
        parts: dict[tuple[str, str], tuple[str, int]] = {}
        for key, members in groups.items():
            parts |= {pair: (key, column) for column, pair in enumerate(_pairs(members))}
        # Of each column block: its name in `uncompressed`, or its group and its place there.
        self._sources: list[str | tuple[str, int]] = [
            own_names[pair] if pair in own_names else parts[pair] for pair in _pairs(ordered)
        ]
        self._group_dims = {
            key: [t.embedding_dim for t in members for _ in t.feature_names]
            for key, members in groups.items()
        }

    @classmethod
    def from_float(
        cls, module: FlowTTEmbeddingBagCollection, use_precomputed_fake_quant: bool = False
    ) -> QuantFlowTTEmbeddingBagCollection:
        """Quantises a collection.

        The dtype of a table's TT-cores is that of ``per_table_weight_dtype[table]``, where there is
        one: float32, float16 or bfloat16. Else it is ``quantization_dtype``, if that is one of
        them. Integer dtypes, the default among them, are for the uncompressed tables; cores then
        keep the dtype in which they were trained.

        Args:
            module: the collection, with TorchRec's ``qconfig``; on any device, meta included.
            use_precomputed_fake_quant: without effect, as in TorchRec.

        Raises:
            TypeError: `module` is no FlowTTEmbeddingBagCollection, or the output's dtype is none
                that a TT table has.
            ValueError: there is no ``qconfig``, or it asks for what a TT table cannot do: another
                dtype for one of them, pruned rows, cores in float16 that do not fit it.
        """
        if not isinstance(module, FlowTTEmbeddingBagCollection):
            raise TypeError(
                "QuantFlowTTEmbeddingBagCollection.from_float: expected a "
                f"FlowTTEmbeddingBagCollection, got {type(module).__name__}"
            )
        qconfig = getattr(module, "qconfig", None)
        if qconfig is None:
            raise ValueError(
                "QuantFlowTTEmbeddingBagCollection.from_float: expected a collection with a "
                "qconfig, got none; torchrec.inference.modules.quantize_inference_model sets it"
            )
        tt_tables = module.tt_tables()
        pruned = getattr(
            module, quant.MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT, {}
        )
        for table in tt_tables:
            if table in pruned:
                raise ValueError(
                    f"TT table {table!r}: rows cannot be pruned, as they share the TT-cores, got "
                    f"{pruned[table]} rows after pruning"
                )
        dtype = output_dtype(qconfig, list(tt_tables))
        cores = {}
        for table in tt_tables:
            trained = module.tt_cores(table)
            target = core_dtype(qconfig, table, trained[0].dtype)
            cores[table] = [
                converted_core(core, target, table, number) for number, core in enumerate(trained)
            ]
        uncompressed = _quantized(module)
        quantized = {}
        if uncompressed is not None:
            quantized = {config.name: config for config in uncompressed.embedding_bag_configs()}
        configs = []
        for config in module.embedding_bag_configs():
            if config.name in tt_tables:
                config = copy.copy(config)
                config.data_type = dtype_to_data_type(cores[config.name][0].dtype)
            configs.append(quantized.get(config.name, config))
        return cls(configs, module.is_weighted(), uncompressed, cores, dtype)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled embeddings of all features.

        Args:
            features: F keys and B bags each; other keys are left out.

        Returns:
            Values ``[B, sum_f D_f]`` of `output_dtype`; see the class for their order.

        Raises:
            KeyError: a feature is not among the keys.
            IndexError: an id is outside its TT table; on CUDA the kernel reports it and stops.
            TypeError, ValueError: something else is wrong with the batch, or it has a batch size
                for each feature, which TorchRec's quantised collection does not support.
        """
        if isinstance(features, KeyedJaggedTensor):
            self._batch_requirements.check_form(features)
            if features.variable_stride_per_key():
                raise ValueError(
                    f"{self._batch_requirements.label}: quantised collections need one batch size "
                    f"for all features, got {features.stride_per_key()}"
                )
            features = for_exchange(features, self._is_weighted)
        try:
            self._batch_requirements.check_lengths(features)
            columns = self._look_up(features)
        except Exception as error:
            self._batch_requirements.explain(features, error)
            raise
        return KeyedTensor(
            keys=self._embedding_names,
            length_per_key=self._length_per_key,
            values=columns[0] if len(columns) == 1 else torch.cat(columns, dim=1),
        )

    def _look_up(self, features: KeyedJaggedTensor) -> list[Tensor]:
        """Columns of each key of the output."""
        keys = features.keys()
        # Always in one order, which the child may remember from its first batch.
        order = [keys.index(name) for names in self._features for name in names]
        if order != list(range(len(keys))):
            features = features.permute(order)
        parts = iter(features.split([len(names) for names in self._features]))
        columns: dict[str | tuple[str, int], Tensor] = {}
        if self.uncompressed is not None:
            columns |= self.uncompressed(next(parts)).to_dict()
        for key, group in self.tt_groups.items():
            part = next(parts)
            weights = part.weights() if self._is_weighted else None
            pooled = group(part.values(), part.offsets(), weights).split(self._group_dims[key], 1)
            columns |= {(key, place): block for place, block in enumerate(pooled)}
        return [columns[source] for source in self._sources]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configurations of all tables, with the data types that they have here."""
        return self._embedding_bag_configs

    def is_weighted(self) -> bool:
        """Whether per-sample weights are used."""
        return self._is_weighted

    def output_dtype(self) -> torch.dtype:
        """Type of the embeddings."""
        return self._output_dtype

    def tt_cores(self, table: str) -> list[nn.Parameter]:
        """The TT-cores of a table, core k of shape ``[p_k, r_(k-1), q_k, r_k]``.

        Raises:
            KeyError: if there is no TT table of that name.
        """
        for key, names in self._tt_tables.items():
            if table in names:
                group = cast(TableBatchedFlowTTEmbeddingBags, self.tt_groups[key])
                return group.split_tt_cores()[names.index(table)]
        tables = sorted(name for names in self._tt_tables.values() for name in names)
        raise KeyError(f"no TT table {table!r}; TT tables are {tables}")

    def keep_packed_cores(self, keep: bool = True) -> None:
        """Keeps packed copies of the TT-cores between lookups; off at first.

        See :class:`~torchrec_flowtt.modules.packed_cores.KeepsPackedCores`.
        """
        for group in self.tt_groups.values():
            cast(TableBatchedFlowTTEmbeddingBags, group).keep_packed_cores(keep)

    def refresh_packed_cores(self) -> None:
        """Packs the TT-cores again, in place; after changes through ``.data``, for example."""
        for group in self.tt_groups.values():
            cast(TableBatchedFlowTTEmbeddingBags, group).refresh_packed_cores()


def _quantized(module: FlowTTEmbeddingBagCollection) -> quant.EmbeddingBagCollection | None:
    """TorchRec's quantised collection of the uncompressed tables."""
    configs = [
        config
        for config in module.embedding_bag_configs()
        if not isinstance(config, FlowTTEmbeddingBagConfig)
    ]
    if not configs:
        return None
    part = EmbeddingBagCollection(configs, module.is_weighted(), torch.device("meta"))
    for config in configs:
        part.embedding_bags[config.name] = module.embedding_bags[config.name]
    part.qconfig = module.qconfig
    for name in _SETTINGS:
        if hasattr(module, name):
            setattr(part, name, getattr(module, name))
    return quant.EmbeddingBagCollection.from_float(part)


def _tt_group(
    tables: list[EmbeddingBagConfig], cores: list[list[Tensor]], dtype: torch.dtype
) -> TableBatchedFlowTTEmbeddingBags:
    """Tables of one pooling and dtype, which hold `cores` themselves."""
    group = TableBatchedFlowTTEmbeddingBags(
        [cast(FlowTTEmbeddingBagConfig, table).tt_spec for table in tables],
        feature_table_map=[k for k, table in enumerate(tables) for _ in table.feature_names],
        pooling_mode=pooling_type_to_str(tables[0].pooling),
        optimizer=OptimType.NONE,
        weights_precision=cores[0][0].dtype,
        output_dtype=dtype,
        device="meta",
        feature_names=_features(tables),
    )
    for number, core in enumerate(core for of_table in cores for core in of_table):
        group.tt_cores[number] = nn.Parameter(core, requires_grad=False)
    return group


def _by_pooling(tables: list[EmbeddingBagConfig]) -> list[EmbeddingBagConfig]:
    """The tables in the order of TorchRec's quantised collection."""
    groups: dict[Any, list[EmbeddingBagConfig]] = {}
    for table in tables:
        key = (table.pooling, getattr(table, "use_virtual_table", False))
        groups.setdefault(key, []).append(table)
    return [table for group in groups.values() for table in group]


def _features(tables: list[EmbeddingBagConfig]) -> list[str]:
    return [name for table in tables for name in table.feature_names]


def _pairs(tables: list[EmbeddingBagConfig]) -> list[tuple[str, str]]:
    return [(table.name, name) for table in tables for name in table.feature_names]


def _embedding_names(tables: list[EmbeddingBagConfig]) -> list[str]:
    return [name for names in get_embedding_names_by_table(tables) for name in names]
