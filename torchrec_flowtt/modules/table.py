"""What modules of one TT table have in common."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchrec_flowtt.functional import rows, to_dense
from torchrec_flowtt.functional.cores import CORE_DTYPES
from torchrec_flowtt.functional.embedding_bag import checked_output_dtype
from torchrec_flowtt.modules.initialization import default_variance, initialize_tt_cores_
from torchrec_flowtt.modules.packed_cores import KeepsPackedCores
from torchrec_flowtt.shapes import TTSpec
from torchrec_flowtt.shapes.arguments import table_label

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["TTTable"]


class TTTable(KeepsPackedCores):
    """A table that is stored as TT-cores; subclasses say how it is looked up.

    Args:
        num_embeddings: N, rows of the table; or a :class:`~torchrec_flowtt.shapes.TTSpec`, which
            replaces the next five arguments (see also :meth:`from_spec`).
        embedding_dim: D, columns of the table.
        tt_ranks: one rank for all inner bonds, or one for each.
        num_cores: 2 to 4; default as many as the other arguments imply, else 3.
        p_shapes: row factors; default balanced ones.
        q_shapes: column factors; default balanced ones.
        output_dtype: dtype of what is looked up; default the cores'.
        init_variance: variance of the table's entries at initialisation; default ``1 / (3 N)``.
        device: device of the cores; nothing is allocated on ``"meta"``.
        dtype: float32, float16, bfloat16 or float64; default torch's default dtype.
        name: name of the table, for messages.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, or the shapes do not fit together.
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
        output_dtype: torch.dtype | None = None,
        init_variance: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        name: str = "",
    ) -> None:
        """Builds the cores; see the class for the arguments."""
        super().__init__()
        if isinstance(num_embeddings, TTSpec):
            shape = (embedding_dim, tt_ranks, num_cores, p_shapes, q_shapes)
            if any(argument is not None for argument in shape):
                raise ValueError(
                    "embedding_dim, tt_ranks, num_cores, p_shapes and q_shapes must not be given "
                    "beside a TTSpec, which holds them"
                )
            spec = num_embeddings
        else:
            if embedding_dim is None or tt_ranks is None:
                missing = "embedding_dim" if embedding_dim is None else "tt_ranks"
                raise TypeError(f"{missing} must be given unless the first argument is a TTSpec")
            spec = TTSpec.suggest(
                num_embeddings,
                embedding_dim,
                tt_ranks=tt_ranks,
                num_cores=num_cores,
                p_shapes=p_shapes,
                q_shapes=q_shapes,
                name=name,
            )
        self.spec = spec
        self.output_dtype = output_dtype
        self.init_variance = (
            default_variance(spec.num_embeddings) if init_variance is None else init_variance
        )
        if (dtype or torch.get_default_dtype()) not in CORE_DTYPES:
            names = ", ".join(str(core_dtype) for core_dtype in CORE_DTYPES)
            raise TypeError(f"dtype must be one of {names}, got {dtype}")
        self.tt_cores = nn.ParameterList(
            nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            for shape in spec.core_shapes
        )
        checked_output_dtype(output_dtype, self.tt_cores[0].dtype)
        self.reset_parameters()

    @classmethod
    def from_spec(cls, spec: TTSpec, **kwargs: Any) -> Self:
        """Builds a table of the shape `spec`.

        Args:
            spec: the shape.
            kwargs: the constructor's other arguments, but those that a TTSpec replaces.
        """
        return cls(spec, **kwargs)

    @property
    def num_embeddings(self) -> int:
        """N, rows of the table."""
        return self.spec.num_embeddings

    @property
    def embedding_dim(self) -> int:
        """D, columns of the table."""
        return self.spec.embedding_dim

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws new cores whose table has the variance `init_variance`; nothing on meta.

        Args:
            generator: source of randomness on the cores' device; default torch's.
        """
        initialize_tt_cores_(list(self.tt_cores), self.init_variance, generator)

    @property
    def _lookup_dtype(self) -> torch.dtype | None:
        """`output_dtype` as the functions take it: after `double()` the cores decide."""
        return None if self.tt_cores[0].dtype == torch.float64 else self.output_dtype

    def to_dense(self) -> Tensor:
        """The uncompressed table, ``[N, D]`` in the cores' dtype. Differentiable."""
        return to_dense(list(self.tt_cores), self.spec.num_embeddings)

    def row(self, index: int) -> Tensor:
        """Row `index` of the table, ``[D]`` in the cores' dtype. Differentiable.

        Raises:
            TypeError: `index` is no integer.
            IndexError: `index` is outside ``[0, N)``.
        """
        index = operator.index(index)
        if not 0 <= index < self.spec.num_embeddings:
            table = table_label(self.spec.name)
            raise IndexError(
                f"{table}: index must be in [0, {self.spec.num_embeddings}), got {index}"
            )
        cores = list(self.tt_cores)
        return rows(cores, torch.tensor(index, device=cores[0].device))

    def extra_repr(self) -> str:
        """Shape and compression, for ``repr``."""
        spec = self.spec
        parts = [
            f"{spec.num_embeddings}, {spec.embedding_dim}, tt_ranks={spec.tt_ranks}",
            f"p_shapes={spec.p_shapes}, q_shapes={spec.q_shapes}",
            *self._lookup_repr(),
            f"compression={spec.compression_ratio:.1f}x",
        ]
        if self.output_dtype is not None:
            parts.append(f"output_dtype={self.output_dtype}")
        return ", ".join(parts)

    def _lookup_repr(self) -> list[str]:
        """What a subclass has to say in ``repr``."""
        return []
