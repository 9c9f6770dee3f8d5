"""The unsharded collection of TT and uncompressed embedding bags."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, pooling_type_to_str
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_flowtt.distributed.batch_forms import for_lookup
from torchrec_flowtt.distributed.batch_requirements import BatchRequirements
from torchrec_flowtt.distributed.embedding_configs import FlowTTEmbeddingBagConfig
from torchrec_flowtt.modules import FlowTTEmbeddingBag
from torchrec_flowtt.modules.lookup_errors import NAMED_ERRORS


class FlowTTEmbeddingBagCollection(EmbeddingBagCollection):
    """An :class:`~torchrec.modules.embedding_modules.EmbeddingBagCollection` with TT tables.

    Tables configured with :class:`FlowTTEmbeddingBagConfig` hold TT-cores, the others the usual
    N x D weight. With F features, batch size B and D_f the dimension of feature f's table, the
    input is a ``KeyedJaggedTensor`` of F keys and B bags each, and the output a ``KeyedTensor``
    of values ``[B, sum_f D_f]``, feature after feature in the order of the tables::

        #           b = 0    b = 1   b = 2
        # "f1"     [0, 1]     []      [2]      table "t1", TT, D = 4
        # "f2"       [3]     [4]    [5, 6]     table "t2", uncompressed, D = 8
        #
        # output       columns 0..3: t1        columns 4..11: t2
        #   b = 0     row(0) + row(1)               row(3)
        #   b = 1          0                        row(4)
        #   b = 2        row(2)                 row(5) + row(6)

    It works eagerly on one device, without any sharder, and never allocates N x D for a TT table,
    so a table of 10^9 rows can be built on a laptop. Keys of its state dict are
    ``embedding_bags.<table>.tt_cores.<k>`` for TT tables, ``embedding_bags.<table>.weight`` for
    the others, and stay the same when it is sharded.

    Args:
        tables: configurations, TT and uncompressed in any order.
        is_weighted: whether the input carries per-sample weights.
        device: where the tables live; ``"meta"`` builds them without memory.

    Raises:
        ValueError: if two tables have one name.

    Example:
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> ebc = FlowTTEmbeddingBagCollection(tables=[
        ...     FlowTTEmbeddingBagConfig(name="t1", num_embeddings=1000, embedding_dim=4,
        ...                              feature_names=["f1"], tt_ranks=2)])
        >>> kjt = KeyedJaggedTensor.from_lengths_sync(
        ...     keys=["f1"], values=torch.tensor([0, 1, 2]), lengths=torch.tensor([2, 0, 1]))
        >>> ebc(kjt)["f1"].shape
        torch.Size([3, 4])
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        """Builds it; see the class for the arguments."""
        target = torch.empty(0).device if device is None else torch.device(device)
        super().__init__(tables=tables, is_weighted=is_weighted, device=torch.device("meta"))
        for config in tables:
            if isinstance(config, FlowTTEmbeddingBagConfig):
                self.embedding_bags[config.name] = FlowTTEmbeddingBag(
                    config.tt_spec,
                    mode=pooling_type_to_str(config.pooling),
                    include_last_offset=True,
                    init_variance=config.init_variance,
                    dtype=config.dtype,
                    device=target,
                )
                continue
            bag = self.embedding_bags[config.name]
            bag.register_forward_pre_hook(_convert_weights, with_kwargs=True)
            if target.type != "meta":
                bag.to_empty(device=target)
        self._device = target
        self._batch_requirements = BatchRequirements(tables, is_weighted)
        self.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled embeddings of all features; see the class for shapes.

        On the CPU errors name the feature and the table, those of uncompressed tables too.

        Raises:
            KeyError: a feature is not among the keys.
            IndexError: an id is outside its TT table.
            TypeError, ValueError, RuntimeError: something else is wrong with the batch.
        """
        if isinstance(features, KeyedJaggedTensor):
            self._batch_requirements.check_form(features)
            features = for_lookup(features, self.is_weighted())
        try:
            if isinstance(features, KeyedJaggedTensor):
                self._batch_requirements.check_lengths(features)
            return super().forward(features)
        except Exception as error:
            self._batch_requirements.explain(features, error)
            if isinstance(features, KeyedJaggedTensor) and features.values().device.type == "cpu":
                self._raise_with_feature(features)
            raise

    @torch.no_grad()
    def _raise_with_feature(self, features: KeyedJaggedTensor) -> None:
        """Repeats the lookups of a batch, and raises the error of the first that fails."""
        jagged = features.to_dict()
        for config in self.embedding_bag_configs():
            for name in config.feature_names:
                feature = jagged[name]
                weights = feature.weights() if self.is_weighted() else None
                try:
                    self.embedding_bags[config.name](
                        feature.values(), feature.offsets(), per_sample_weights=weights
                    )
                except (*NAMED_ERRORS, RuntimeError) as error:
                    # The lookup in a TT table has named the table itself.
                    is_tt = isinstance(config, FlowTTEmbeddingBagConfig)
                    label = f"feature {name!r}" + ("" if is_tt else f", table {config.name!r}")
                    kind = next(k for k in (*NAMED_ERRORS, RuntimeError) if isinstance(error, k))
                    raise kind(f"{label}: {error}") from error

    def tt_tables(self) -> dict[str, FlowTTEmbeddingBagConfig]:
        """Configurations of the TT tables by table name."""
        return {
            config.name: config
            for config in self.embedding_bag_configs()
            if isinstance(config, FlowTTEmbeddingBagConfig)
        }

    def tt_cores(self, table: str) -> list[nn.Parameter]:
        """The TT-cores of a table, core k of shape ``[p_k, r_(k-1), q_k, r_k]``.

        Raises:
            KeyError: if there is no TT table of that name.
        """
        if table not in self.tt_tables():
            raise KeyError(f"no TT table {table!r}; TT tables are {sorted(self.tt_tables())}")
        return list(cast(FlowTTEmbeddingBag, self.embedding_bags[table]).tt_cores)

    def keep_packed_cores(self, keep: bool = True) -> None:
        """Keeps packed copies of the TT-cores between lookups without a gradient; off at first.

        Of all TT tables; see :class:`~torchrec_flowtt.modules.packed_cores.KeepsPackedCores`. A
        sharded collection has this method too, and starts without copies.
        """
        for table in self.tt_tables():
            cast(FlowTTEmbeddingBag, self.embedding_bags[table]).keep_packed_cores(keep)

    def refresh_packed_cores(self) -> None:
        """Packs the TT-cores again, in place; after changes through ``.data``, for example."""
        for table in self.tt_tables():
            cast(FlowTTEmbeddingBag, self.embedding_bags[table]).refresh_packed_cores()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise every table by its configuration; does nothing on the meta device."""
        if torch.device(self.device).type == "meta":
            return
        tt_tables = self.tt_tables()
        for config in self.embedding_bag_configs():
            if config.name in tt_tables:
                self.embedding_bags[config.name].reset_parameters()
            else:
                config.init_fn(self.embedding_bags[config.name].weight)


def _convert_weights(
    bag: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gives an uncompressed bag weights of its own dtype: torch takes no other, FBGEMM any."""
    weights = kwargs.get("per_sample_weights")
    if weights is not None:
        kwargs = {**kwargs, "per_sample_weights": weights.to(bag.weight.dtype)}
    return args, kwargs
