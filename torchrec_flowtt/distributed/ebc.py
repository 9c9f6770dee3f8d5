"""The unsharded collection of TT and uncompressed embedding bags."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, pooling_type_to_str
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_flowtt.distributed.embedding_configs import FlowTTEmbeddingBagConfig
from torchrec_flowtt.modules import FlowTTEmbeddingBag


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
            elif target.type != "meta":
                self.embedding_bags[config.name].to_empty(device=target)
        self._device = target
        self.reset_parameters()

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
