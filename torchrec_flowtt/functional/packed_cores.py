"""Packed copies of TT-cores, kept between lookups while the cores are unchanged."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from torchrec_flowtt.functional.torch_settings import tf32_allowed

if TYPE_CHECKING:
    from torchrec_flowtt.functional.lookup import BatchedLookup

__all__ = ["PackedCores"]


class PackedCores:
    """Packed copies of the TT-cores of one call, kept between lookups.

    A lookup on CUDA first brings the cores into the order in which the tensor cores take them.
    Given to lookups as ``packed``, this object keeps the outcome for the next ones that want no
    gradient; their results are the same, bit for bit. It takes as much device memory as float32
    cores and what pads their slices, half of that with TF32 or where cores and result have 16 bits;
    on the CPU, whose kernels read the cores as they are, none. Calls of few lookups take a kernel
    that has no use for it.

    The cores are packed again, in the same memory, when a lookup finds that they have changed: they
    are other tensors, or their version counters or addresses are others. Changes through ``.data``
    and by collectives (``torch.distributed.broadcast``) do not count versions: call
    :meth:`invalidate` after them. A change of PyTorch's TF32 setting, or of the cores' shapes,
    dtype or device, takes new memory.

    A captured CUDA graph reads this memory and does not look at the cores: after they have changed,
    call :meth:`refresh`, or look up once outside of the graph, before it is replayed. The object
    must outlive the graph, with the settings that the capture had. A lookup that is captured while
    the copy is out of date, or before there is one, packs the cores in the graph, as without this
    object. So do graphs of ``torch.compile``, ``torch.export``, ``torch.jit.trace`` and
    ``make_fx``, in which the copy would be a constant; lookups inside the transforms of
    ``torch.func``; and lookups in cores that were computed with a gradient, or made under
    ``torch.inference_mode``, which have no version counters.

    The object holds the cores of the last lookup.

    Lookups on another stream than that of the packing wait for it. Copies of the object, pickled
    ones too, are empty.

    >>> from torchrec_flowtt.functional import tt_embedding
    >>> cores = [torch.rand(2, 1, 3, 2), torch.rand(4, 2, 2, 1)]
    >>> packed = PackedCores()
    >>> with torch.no_grad():
    ...     rows = tt_embedding(torch.tensor([1, 5]), cores, packed=packed)
    """

    def __init__(self) -> None:
        """Packs nothing yet: the first lookup does."""
        self._packing: _Packing | None = None

    @property
    def nbytes(self) -> int:
        """Memory that is kept, in bytes."""
        return 0 if self._packing is None else self._packing.tensor.nbytes

    def refresh(self) -> None:
        """Packs the cores of the last lookup again if they have changed since.

        In place; nothing happens before the first lookup.
        """
        if self._packing is not None:
            self.current(self._packing.cores(), self._packing.lookup)

    def invalidate(self) -> None:
        """Has the next lookup, or :meth:`refresh`, pack again, in place."""
        if self._packing is not None:
            self._packing.is_valid = False

    def forget_moved_cores(self, cores: Sequence[Tensor]) -> None:
        """Gives the memory back unless `cores` were packed, and are where they were."""
        if self._packing is not None and not self._packing.is_in_place(cores):
            self._packing = None

    def current(self, cores: Sequence[Tensor], lookup: BatchedLookup) -> Tensor | None:
        """What ``flowtt::tt_embedding_bag_packed`` takes as ``packed``, up to date.

        None if the lookup has to pack the cores itself; see the class.
        """
        if _is_traced_or_transformed():
            return None
        allow_tf32 = tf32_allowed()
        packing = self._packing
        if packing is not None and packing.is_of(cores, lookup, allow_tf32):
            packing.wait()
            return packing.tensor
        del packing  # its memory may have to make room
        return self._pack(cores, lookup, allow_tf32)

    def _pack(
        self, cores: Sequence[Tensor], lookup: BatchedLookup, allow_tf32: bool
    ) -> Tensor | None:
        first = cores[0]
        # To hold a core that was computed with a gradient would hold what it was computed from.
        if any(core.is_inference() or core.grad_fn is not None for core in cores):
            return None
        if first.is_meta or any(isinstance(core, FakeTensor) for core in cores):
            return None
        if first.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        settings = (lookup.output_dtype, allow_tf32)
        layout = (first.device, first.dtype, lookup.cores_per_table, [core.shape for core in cores])
        arguments = (cores, lookup.cores_per_table, lookup.num_embeddings, *settings)
        old = self._packing
        tensor: Tensor
        # Written to in any mode later on, which a tensor made in inference mode could not be.
        with torch.inference_mode(False), torch.no_grad():
            if old is not None and (old.layout, old.settings) == (layout, settings):
                old.wait()
                tensor = old.tensor
                torch.ops.flowtt.repack_tt_cores(tensor, *arguments)
            else:
                old = self._packing = None
                tensor = torch.ops.flowtt.pack_tt_cores(*arguments)
        versions = [core._version for core in cores]
        addresses = [core.data_ptr() for core in cores]
        sources = list(zip(cores, versions, addresses, strict=True))
        self._packing = _Packing(tensor, sources, lookup, layout, settings)
        return tensor

    def __reduce__(self) -> tuple[type[PackedCores], tuple[()]]:
        """Copies are empty."""
        return PackedCores, ()


@dataclasses.dataclass
class _Packing:
    """What was packed, and of which cores.

    Attributes:
        tensor: the packed cores.
        sources: of each core itself, its version and its address. No weak references, which
            ``torch.utils.swap_tensors`` refuses; an identity alone may be another tensor's later.
        lookup: that it was packed for.
        layout: of the cores; what the tensor's size depends on, with `settings`.
        settings: the output's dtype, and whether TF32 is allowed.
        is_valid: whether it holds as long as versions and addresses are the same.
        ready: recorded when the packing has been done, on CUDA.
        streams: that have it behind them.
    """

    tensor: Tensor
    sources: Sequence[tuple[Tensor, int, int]]
    lookup: BatchedLookup
    layout: tuple[Any, ...]
    settings: tuple[torch.dtype, bool]
    is_valid: bool = True
    ready: torch.cuda.Event | None = None
    streams: set[torch.cuda.Stream] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        """Marks the end of the packing on the current stream."""
        if self.tensor.is_cuda:
            stream = torch.cuda.current_stream(self.tensor.device)
            self.ready = stream.record_event()
            self.streams.add(stream)

    def cores(self) -> list[Tensor]:
        """The cores."""
        return [core for core, _, _ in self.sources]

    def is_of(self, cores: Sequence[Tensor], lookup: BatchedLookup, allow_tf32: bool) -> bool:
        """Whether the cores are as they were packed, for the same setting."""
        if (
            not self.is_valid
            or self.settings != (lookup.output_dtype, allow_tf32)
            or len(cores) != len(self.sources)
            or self.lookup.cores_per_table != lookup.cores_per_table
        ):
            return False
        # A loop, as it is in the way of every lookup.
        for core, (source, version, address) in zip(cores, self.sources, strict=True):
            if source is not core or core._version != version or core.data_ptr() != address:
                return False
        return True

    def is_in_place(self, cores: Sequence[Tensor]) -> bool:
        """Whether these are the cores, where they were."""
        return len(cores) == len(self.sources) and all(
            source is core and core.data_ptr() == address
            for core, (source, _, address) in zip(cores, self.sources, strict=True)
        )

    def wait(self) -> None:
        """Puts the packing behind the current stream, whichever stream did it."""
        if self.ready is None:
            return
        stream = torch.cuda.current_stream(self.tensor.device)
        # Whoever captures a graph waits for the device first.
        if stream not in self.streams and not torch.cuda.is_current_stream_capturing():
            stream.wait_event(self.ready)
            self.tensor.record_stream(stream)
            self.streams.add(stream)


def _is_traced_or_transformed() -> bool:
    """Whether what is computed now is recorded, or belongs to a level of a transform."""
    return (
        torch.jit.is_tracing()  # type: ignore[attr-defined]
        or torch._C._are_functorch_transforms_active()
        or get_proxy_mode() is not None
    )
