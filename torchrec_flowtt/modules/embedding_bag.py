"""One TT table, called as `torch.nn.EmbeddingBag`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_flowtt.functional import PoolingMode, tt_embedding_bag
from torchrec_flowtt.modules.lookup_errors import NAMED_ERRORS, named_table
from torchrec_flowtt.modules.table import TTTable
from torchrec_flowtt.shapes import TTSpec

__all__ = ["FlowTTEmbeddingBag"]


class FlowTTEmbeddingBag(TTTable):
    """Sums or means of bags of rows of a table that is stored as TT-cores.

    Takes the place of ``torch.nn.EmbeddingBag(num_embeddings, embedding_dim, mode=...)``; the call
    is the same. Gradients of the cores are dense tensors, for any torch optimizer. Of the
    arguments of `EmbeddingBag`, ``max_norm``, ``scale_grad_by_freq``, ``sparse``, ``padding_idx``
    and the mode ``"max"`` have no counterpart.

    Args:
        num_embeddings: N, rows of the table; or a :class:`~torchrec_flowtt.shapes.TTSpec`, which
            replaces the next five arguments (see also :meth:`from_spec`).
        embedding_dim: D, columns of the table.
        tt_ranks: one rank for all inner bonds, or one for each.
        num_cores: 2 to 4; default as many as the other arguments imply, else 3.
        p_shapes: row factors; default balanced ones, see
            :meth:`~torchrec_flowtt.shapes.TTSpec.suggest`.
        q_shapes: column factors; default balanced ones.
        mode: ``"sum"`` or ``"mean"``; ``"mean"`` is the default, as it is in `EmbeddingBag`.
        include_last_offset: whether the offsets given to the call end with the number of indices.
        output_dtype: dtype of the result; default the cores'. float64 cores give float64.
        init_variance: variance of the table's entries at initialisation; default ``1 / (3 N)``,
            that of TorchRec's `EmbeddingBagConfig`.
        device: device of the cores. On ``"meta"`` nothing is allocated; use :meth:`to_empty` and
            :meth:`reset_parameters` afterwards.
        dtype: float32, float16, bfloat16 or float64; default torch's default dtype.
        name: name of the table, for messages.

    Attributes:
        tt_cores: parameters ``[p_k, r_(k-1), q_k, r_k]``, in the state dict ``tt_cores.0`` and on.
        spec: the table's shape.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or the shapes do not fit together.

    >>> bag = FlowTTEmbeddingBag(1_000_000, 64, tt_ranks=16, mode="sum")
    >>> bag(torch.tensor([3, 999_999, 3]), torch.tensor([0, 2])).shape
    torch.Size([2, 64])
    >>> bag.row(3).shape
    torch.Size([64])
    >>> print(bag.extra_repr())
    1000000, 64, tt_ranks=(16, 16), p_shapes=(100, 100, 100), ..., compression=555.6x
    """

    def __init__(
        self,
        num_embeddings: int | TTSpec,
        embedding_dim: int | None = None,
        *,
        tt_ranks: int | Sequence[int] | None = None,
        num_cores: int | None = None,
        p_shapes: Sequence[int] | None = None,
        q_shapes: Sequence[int] | None = None,
        mode: str | PoolingMode = "mean",
        include_last_offset: bool = False,
        output_dtype: torch.dtype | None = None,
        init_variance: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        name: str = "",
    ) -> None:
        """Builds the cores; see the class for the arguments."""
        super().__init__(
            num_embeddings,
            embedding_dim,
            tt_ranks=tt_ranks,
            num_cores=num_cores,
            p_shapes=p_shapes,
            q_shapes=q_shapes,
            output_dtype=output_dtype,
            init_variance=init_variance,
            device=device,
            dtype=dtype,
            name=name,
        )
        self.mode = PoolingMode.of_bags(mode).name.lower()
        self.include_last_offset = include_last_offset

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Pools the rows `input` of each bag.

        Args:
            input: row indices, int32 or int64: ``[nnz]`` with `offsets`, or ``[B, L]`` without.
            offsets: starts of the bags, ``[B]``, or ``[B + 1]`` with `include_last_offset`.
            per_sample_weights: factors shaped as `input`, floating; also with the mean, which is
                then the weighted sum divided by the bag's length.

        Returns:
            ``[B, D]``.

        Raises:
            TypeError, ValueError, IndexError: see
                :func:`~torchrec_flowtt.functional.tt_embedding_bag`.
        """
        try:
            return tt_embedding_bag(
                input,
                list(self.tt_cores),
                offsets,
                num_embeddings=self.spec.num_embeddings,
                mode=self.mode,
                per_sample_weights=per_sample_weights,
                include_last_offset=self.include_last_offset,
                output_dtype=self._lookup_dtype,
                packed=self._packed_cores,
            )
        except NAMED_ERRORS as error:
            raise named_table(error, self.spec.name) from None

    def _lookup_repr(self) -> list[str]:
        parts = [f"mode={self.mode!r}"]
        if self.include_last_offset:
            parts.append("include_last_offset=True")
        return parts
