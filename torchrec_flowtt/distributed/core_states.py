"""TT-cores and their optimizer states as distributed tensors, for state dicts and checkpoints.

A table-wise TT table lives on one rank. Each of its cores, and each optimizer state of a core, is
one ShardedTensor of a single shard (or one DTensor, when the sharding environment asks for them),
so that torch.distributed.checkpoint saves it once and can load it into any other placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.tensor import DTensor, Replicate
from torchrec.distributed.shards_wrapper import LocalShardsWrapper
from torchrec.distributed.types import Shard, ShardedTensor, ShardedTensorMetadata, ShardMetadata

from torchrec_flowtt.distributed.compat import clear_local_chunks, sharded_tensor


@dataclass(frozen=True)
class CorePlacement:
    """Where the cores of one table-wise TT table are.

    Attributes:
        placement: TorchRec's placement of the table's shard, such as ``"rank:0/cpu"``.
        process_group: the group the table is sharded over.
        device_mesh: set when state dicts are to hold DTensors.
    """

    placement: Any
    process_group: Any
    device_mesh: Any = None

    def distribute(
        self, size: Sequence[int], dtype: torch.dtype, local: torch.Tensor | None
    ) -> ShardedTensor | DTensor:
        """One distributed tensor of `size` whose only shard is `local` on the table's rank.

        Args:
            size: global size, which is the shard's too.
            dtype: dtype of the tensor.
            local: the shard, or ``None`` on the other ranks. It is not copied.
        """
        if self.device_mesh is not None:
            tensor = DTensor.from_local(
                local_tensor=LocalShardsWrapper(
                    local_shards=[] if local is None else [local],
                    local_offsets=[] if local is None else [(0,) * len(size)],
                ),
                device_mesh=self.device_mesh,
                placements=(Replicate(),) * self.device_mesh.ndim,
                shape=torch.Size(size),
                stride=_contiguous_stride(size),
                run_check=False,
            )
            if local is None:
                clear_local_chunks(tensor)
            return tensor
        shard = ShardMetadata(
            shard_offsets=[0] * len(size), shard_sizes=list(size), placement=self.placement
        )
        metadata = ShardedTensorMetadata(
            shards_metadata=[shard],
            size=torch.Size(size),
            tensor_properties=TensorProperties(dtype=dtype, requires_grad=False),
        )
        return sharded_tensor(
            [] if local is None else [Shard(local, shard)], metadata, self.process_group
        )


def local_core(value: Any, owned: bool, key: str) -> torch.Tensor:
    """What to load into this rank's parameter from an entry of a state dict.

    Args:
        value: a ShardedTensor or DTensor of one shard, or the whole core as a plain tensor.
        owned: whether this rank holds the table.
        key: the entry's key, for messages.

    Returns:
        The core on the table's rank, an empty tensor elsewhere.

    Raises:
        RuntimeError: if the value is of another type, or its shard is not on the table's rank.
    """
    if isinstance(value, ShardedTensor):
        shards = [shard.tensor for shard in value.local_shards()]
    elif isinstance(value, DTensor):
        wrapper: Any = value.to_local()
        shards = list(wrapper.local_shards())
    elif isinstance(value, torch.Tensor):
        shards = [value]
    else:
        raise RuntimeError(
            f"{key}: expected a tensor in the state dict, got {type(value).__name__}"
        )
    if not owned:
        return torch.empty(0)
    if len(shards) != 1:
        raise RuntimeError(
            f"{key}: this rank holds the table, but the state dict has {len(shards)} shards of it "
            "here; load it with torch.distributed.checkpoint, which moves shards between ranks"
        )
    core: torch.Tensor = shards[0]
    return core


def _contiguous_stride(size: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for extent in reversed(size):
        stride.append(step)
        step *= extent
    return tuple(reversed(stride))
