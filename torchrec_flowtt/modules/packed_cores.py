"""Modules that can keep packed copies of their TT-cores between lookups."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from torchrec_flowtt.functional import PackedCores

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["KeepsPackedCores"]


class KeepsPackedCores(nn.Module):
    """What all modules with TT-cores are: their lookups may keep packed copies of the cores."""

    _packed_cores: PackedCores | None = None

    def keep_packed_cores(self, keep: bool = True) -> None:
        """Keeps packed copies of the cores between lookups without a gradient; off at first.

        For inference on CUDA: a lookup brings the cores into the order in which the tensor cores
        take them, which need not be done again while they are unchanged. Results are the same, bit
        for bit. It takes as much device memory as the cores in float32 and what pads their slices,
        half of that with TF32 or where cores and result have 16 bits. Lookups that a gradient is
        wanted of, those on the CPU, those inside the transforms of ``torch.func``, and recorded
        ones (``torch.compile``, ``torch.export``, ``torch.jit.trace``, ``make_fx``) are as before.

        Changes of the parameters in place (steps of any optimizer, ``load_state_dict``, ``copy_``)
        are noticed by the next lookup, which packs again; so are moves and conversions. Changes
        through ``.data`` and by collectives (``torch.distributed.broadcast``) are not: call
        :meth:`refresh_packed_cores` after them.

        A captured CUDA graph reads the copies and does not look at the parameters: after these have
        changed, call :meth:`refresh_packed_cores`, or look up once outside of the graph, before it
        is replayed. The module must not be moved or told to keep nothing while a graph is in use,
        nor PyTorch's TF32 setting be changed between its lookups. A lookup that is captured while
        the copies are out of date, or before there are any, packs the cores in the graph.

        The copies are not in the state dict. A copy of the module, or one that was pickled, has the
        same setting, and makes its own. See :class:`~torchrec_flowtt.functional.PackedCores`.

        Args:
            keep: False drops the copies; lookups then pack the cores as they do without a call of
                this method.
        """
        if not keep:
            self._packed_cores = None
        elif self._packed_cores is None:
            self._packed_cores = PackedCores()

    def refresh_packed_cores(self) -> None:
        """Packs the cores of the last lookup again, in place, whether or not they have changed.

        Nothing happens where no copies are kept, or before the first lookup.
        """
        if self._packed_cores is not None:
            self._packed_cores.invalidate()
            self._packed_cores.refresh()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copies, shallow ones too, have packed cores of their own."""
        super().__setstate__(state)
        if self._packed_cores is not None:
            self._packed_cores = PackedCores()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        # Cores have four dimensions, so `to(memory_format=torch.channels_last)` of a model takes
        # them for images. The kernels read, and fused steps write, contiguous ones.
        grads = (core.grad for core in self.parameters() if core.grad is not None)
        for tensor in itertools.chain(self.parameters(), self.buffers(), grads):
            if not tensor.is_contiguous():
                tensor.data = tensor.data.contiguous()
        if self._packed_cores is not None:
            self._packed_cores.forget_moved_cores(list(self.parameters()))
        return self
