"""The unsharded collection of TT and uncompressed sequence embeddings."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_flowtt.distributed.batch_requirements import BatchRequirements
from torchrec_flowtt.distributed.embedding_configs import FlowTTEmbeddingConfig
from torchrec_flowtt.distributed.tt_collection import TTTableCollection
from torchrec_flowtt.modules import FlowTTEmbedding


class FlowTTEmbeddingCollection(TTTableCollection, EmbeddingCollection):
    """An :class:`~torchrec.modules.embedding_modules.EmbeddingCollection` with TT tables.

    Tables configured with :class:`FlowTTEmbeddingConfig` hold TT-cores, the others the usual
    N x D weight; all have one D. The input is a ``KeyedJaggedTensor`` of F keys and B sequences
    each. The output is a dictionary with, for each feature f, a ``JaggedTensor`` of float32
    values ``[L_f, D]``, one row for each of its L_f ids, and the lengths ``[B]`` of the
    sequences. A feature of several tables is called ``<feature>@<table>``, once for each::

        #           b = 0    b = 1   b = 2
        # "f1"     [0, 1]     []      [2]      table "t1", TT
        # "f2"       [3]     [4]    [5, 6]     table "t2", uncompressed
        #
        # output["f1"]: values row(0), row(1), row(2) of t1           lengths 2, 0, 1
        # output["f2"]: values row(3), row(4), row(5), row(6) of t2   lengths 1, 1, 2

    It works eagerly on one device, without any sharder, and never allocates N x D for a TT table.
    Keys of its state dict are ``embeddings.<table>.tt_cores.<k>`` for TT tables,
    ``embeddings.<table>.weight`` for the others, and stay the same when it is sharded.

    Args:
        tables: configurations, TT and uncompressed in any order.
        device: where the tables live; ``"meta"`` builds them without memory.
        need_indices: whether the output has the ids too, as the weights of its jagged tensors.
        **kwargs: further arguments of ``EmbeddingCollection``.

    Raises:
        ValueError: if two tables have one name, or tables differ in D.

    Example:
        >>> from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        >>> ec = FlowTTEmbeddingCollection(tables=[
        ...     FlowTTEmbeddingConfig(name="t1", num_embeddings=1000, embedding_dim=4,
        ...                           feature_names=["f1"], tt_ranks=2)])
        >>> kjt = KeyedJaggedTensor.from_lengths_sync(
        ...     keys=["f1"], values=torch.tensor([0, 1, 2]), lengths=torch.tensor([2, 0, 1]))
        >>> ec(kjt)["f1"].values().shape
        torch.Size([3, 4])
    """

    TABLES: ClassVar[str] = "embeddings"

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        **kwargs: Any,
    ) -> None:
        """Builds it; see the class for the arguments."""
        target = torch.empty(0).device if device is None else torch.device(device)
        super().__init__(
            tables=tables, device=torch.device("meta"), need_indices=need_indices, **kwargs
        )
        for config in tables:
            if isinstance(config, FlowTTEmbeddingConfig):
                self.embeddings[config.name] = FlowTTEmbedding(
                    config.tt_spec,
                    init_variance=config.init_variance,
                    dtype=config.dtype,
                    device=target,
                )
            elif target.type != "meta":
                self.embeddings[config.name].to_empty(device=target)
        self._device = target
        self._batch_requirements = BatchRequirements(tables, is_weighted=None)
        self.reset_parameters()

    def _look_up(self, table: str, feature: JaggedTensor) -> torch.Tensor:
        rows: torch.Tensor = self.embeddings[table](feature.values())
        return rows
