"""One TT table, called as `torch.nn.Embedding`."""

from __future__ import annotations

from torch import Tensor

from torchrec_flowtt.functional import tt_embedding
from torchrec_flowtt.modules.lookup_errors import NAMED_ERRORS, named_table
from torchrec_flowtt.modules.table import TTTable

__all__ = ["FlowTTEmbedding"]


class FlowTTEmbedding(TTTable):
    """Rows of a table that is stored as TT-cores.

    Takes the place of ``torch.nn.Embedding(num_embeddings, embedding_dim)``; the call is the same.
    Gradients of the cores are dense tensors, for any torch optimizer. Of the arguments of
    `Embedding`, ``padding_idx``, ``max_norm``, ``scale_grad_by_freq`` and ``sparse`` have no
    counterpart.

    Args:
        num_embeddings: N, rows of the table; or a :class:`~torchrec_flowtt.shapes.TTSpec`, which
            replaces the next five arguments (see also :meth:`from_spec`).
        embedding_dim: D, columns of the table.
        tt_ranks: one rank for all inner bonds, or one for each.
        num_cores: 2 to 4; default as many as the other arguments imply, else 3.
        p_shapes: row factors; default balanced ones, see
            :meth:`~torchrec_flowtt.shapes.TTSpec.suggest`.
        q_shapes: column factors; default balanced ones.
        output_dtype: dtype of the result; default the cores'. float64 cores give float64.
        init_variance: variance of the table's entries at initialisation; default ``1 / (3 N)``,
            that of TorchRec's `EmbeddingConfig`.
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

    >>> import torch
    >>> embedding = FlowTTEmbedding(1_000_000, 64, tt_ranks=16)
    >>> embedding(torch.tensor([[3, 999_999], [0, 3]])).shape
    torch.Size([2, 2, 64])
    """

    def forward(self, input: Tensor) -> Tensor:
        """The rows `input`.

        Args:
            input: row indices of any shape, int32 or int64.

        Returns:
            ``[*, D]``, with the shape of `input` in place of ``*``.

        Raises:
            TypeError, ValueError, IndexError: see
                :func:`~torchrec_flowtt.functional.tt_embedding`.
        """
        try:
            return tt_embedding(
                input,
                list(self.tt_cores),
                num_embeddings=self.spec.num_embeddings,
                output_dtype=self._lookup_dtype,
                packed=self._packed_cores,
            )
        except NAMED_ERRORS as error:
            raise named_table(error, self.spec.name) from None
