"""The dtypes of a batch's tensors, which the ranks that exchange batches have to share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

# By their position here ranks tell each other their dtypes. Lengths of no bags may be no integers.
_DTYPES = (
    torch.int32,
    torch.int64,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
)


class ExchangedDtypes:
    """Refuses batches of which another rank would read the bytes as another dtype.

    A rank takes what it receives for the dtype of its own batch. Ranks compare their dtypes once,
    at the first batch, in a collective of a few bytes; from then on each holds its own to that, so
    no further batch costs a collective.

    Args:
        process_group: the ranks that exchange batches.
        label: how messages call a batch.
    """

    def __init__(self, process_group: Any, label: str) -> None:
        """Builds it; see the class for the arguments."""
        self._process_group = process_group
        self._label = label
        self._agreed: dict[str, torch.dtype] | None = None

    def check(self, features: KeyedJaggedTensor) -> None:
        """Compares the batch with those of the other ranks, or with the first one.

        Raises:
            TypeError: on every rank, if they differ in the first batch; afterwards on the rank
                that has another dtype than in its first.
        """
        lengths = features.lengths_or_none()
        found = {
            "values": features.values().dtype,
            "lengths": features.offsets().dtype if lengths is None else lengths.dtype,
        }
        if self._agreed is None:
            self._compare_with_other_ranks(found, features.values().device)
            self._agreed = found
        for argument, dtype in found.items():
            if dtype != self._agreed[argument]:
                raise TypeError(
                    f"{self._label}: {argument} must keep the dtype of the first batch, "
                    f"{self._agreed[argument]}, as ranks exchange them, got {dtype}"
                )

    def _compare_with_other_ranks(
        self, found: dict[str, torch.dtype], device: torch.device
    ) -> None:
        own = torch.tensor([_DTYPES.index(dtype) for dtype in found.values()], device=device)
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(self._process_group))]
        dist.all_gather(gathered, own, group=self._process_group)
        of_ranks = torch.stack(gathered).T.tolist()
        for argument, codes in zip(found, of_ranks, strict=True):
            if len(set(codes)) > 1:
                examples = ", ".join(
                    f"{_DTYPES[code]} on rank {codes.index(code)}" for code in sorted(set(codes))
                )
                raise TypeError(
                    f"{self._label}: {argument} must have one dtype on all ranks, as they exchange "
                    f"them, got {examples}"
                )
