"""How the rows of a bag are combined."""

from __future__ import annotations

import enum

__all__ = ["PoolingMode"]


class PoolingMode(enum.IntEnum):
    """Pooling of the rows of a bag, with FBGEMM's values. ``NONE``: every row is returned.

    ``PoolingMode.of(value)`` also takes torch's mode strings, plain ints and FBGEMM's enum members.

    >>> PoolingMode.of("mean")
    <PoolingMode.MEAN: 1>
    >>> PoolingMode.of("max")
    Traceback (most recent call last):
    ...
    ValueError: pooling mode must be one of 'sum', 'mean', 'none', got 'max'
    """

    SUM = 0
    MEAN = 1
    NONE = 2

    @classmethod
    def of(cls, value: int | str | PoolingMode) -> PoolingMode:
        """The mode that `value` stands for.

        Raises:
            ValueError: `value` stands for none.
        """
        mode = _find(value)
        if mode is None:
            valid = ", ".join(repr(name) for name in _MODES if isinstance(name, str))
            raise ValueError(f"pooling mode must be one of {valid}, got {value!r}")
        return mode

    @classmethod
    def of_bags(cls, value: int | str | PoolingMode) -> PoolingMode:
        """The mode that `value` stands for, where there must be one row a bag.

        Raises:
            ValueError: `value` stands for no mode, or for ``NONE``.
        """
        mode = _find(value)
        if mode is PoolingMode.NONE:
            raise ValueError(
                "pooling mode must be one of 'sum', 'mean' for bags, got 'none'; single rows come "
                "from functional.tt_embedding and FlowTTEmbedding"
            )
        if mode is None:
            raise ValueError(f"pooling mode must be one of 'sum', 'mean' for bags, got {value!r}")
        return mode


def _find(value: object) -> PoolingMode | None:
    return _MODES.get(value) if isinstance(value, (int, str)) else None


# A dictionary, because torch.compile of torch 2.11 cannot trace a loop over an enum.
_MODES: dict[int | str, PoolingMode] = {
    **{mode.name.lower(): mode for mode in PoolingMode},
    **{mode.value: mode for mode in PoolingMode},
}
