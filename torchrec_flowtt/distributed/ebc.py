"""The unsharded collection of TT and uncompressed embedding bags."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, pooling_type_to_str
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_flowtt.distributed.batch_requirements import BatchRequirements
from torchrec_flowtt.distributed.embedding_configs import FlowTTEmbeddingBagConfig
from torchrec_flowtt.distributed.tt_collection import TTTableCollection
from torchrec_flowtt.modules import FlowTTEmbeddingBag


class FlowTTEmbeddingBagCollection(TTTableCollection, EmbeddingBagCollection):
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

    TABLES: ClassVar[str] = "embedding_bags"

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

    def _look_up(self, table: str, feature: JaggedTensor) -> torch.Tensor:
        weights = feature.weights() if self.is_weighted() else None
        pooled: torch.Tensor = self.embedding_bags[table](
            feature.values(), feature.offsets(), per_sample_weights=weights
        )
        return pooled


def _convert_weights(
    bag: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Gives an uncompressed bag weights of its own dtype: torch takes no other, FBGEMM any."""
    weights = kwargs.get("per_sample_weights")
    if weights is not None:
        kwargs = {**kwargs, "per_sample_weights": weights.to(bag.weight.dtype)}
    return args, kwargs
