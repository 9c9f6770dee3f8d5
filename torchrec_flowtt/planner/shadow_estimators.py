"""Estimates for TT tables, by TorchRec's own estimators.

TorchRec's estimators know FBGEMM tables. For every option of a TT table they are shown a *shadow*:
the same option for an FBGEMM table of the same dimension with as many rows as the TT-cores have
elements to fill. Input, output, all-to-all and all-reduce costs then come out right in every
TorchRec release. Two things are corrected afterwards: storage by the exact bytes of cores and
optimizer state, and compute time by what was measured on the card, or else by the arithmetic of
the core products.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import Shard, ShardEstimator, ShardingOption, Topology
from torchrec.distributed.types import ShardingType
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from torchrec_flowtt.distributed.compat import with_tensor
from torchrec_flowtt.distributed.fused_params import FusedOptimizerParams
from torchrec_flowtt.distributed.table_parameters import tt_spec_of
from torchrec_flowtt.planner.lookup_cost import LookupLoad, TTLookupCost
from torchrec_flowtt.shapes import TTSpec


def shadow_rows(spec: TTSpec) -> int:
    """Rows of the FBGEMM table that has as many elements as the TT-cores, rounded up."""
    return math.ceil(spec.num_parameters / spec.embedding_dim)


def shadow_option(option: ShardingOption, spec: TTSpec) -> ShardingOption:
    """The option of an FBGEMM table that stands for a TT table's.

    Args:
        option: an option of a TT table, table-wise or data-parallel.
        spec: its TT shape.
    """
    shadow = copy.copy(option)
    size = [shadow_rows(spec), spec.embedding_dim]
    with_tensor(shadow, nn.Parameter(torch.empty(size, dtype=option.tensor.dtype, device="meta")))
    data_parallel = option.sharding_type == ShardingType.DATA_PARALLEL.value
    kernel = EmbeddingComputeKernel.DENSE if data_parallel else EmbeddingComputeKernel.FUSED
    shadow.compute_kernel = kernel.value
    shadow.shards = [
        Shard(
            size=list(size),
            offset=[0, 0],
            rank=shard.rank,
            perf=shard.perf,
            storage=shard.storage,
        )
        for shard in option.shards
    ]
    return shadow


def optimizer_bytes(option: ShardingOption, spec: TTSpec, fused_params: Mapping[str, Any]) -> int:
    """Bytes of optimizer state of a TT table under `option`.

    Data-parallel tables train through a dense optimizer that the planner does not see, unless
    ``apply_optimizer_in_backward`` recorded one; as TorchRec does, none is charged then.
    """
    params = dict(fused_params)
    classes = getattr(option.tensor, "_optimizer_classes", [])
    if classes:
        params["optimizer"] = optimizer_type_to_emb_opt_type(classes[0])
    elif option.sharding_type == ShardingType.DATA_PARALLEL.value:
        return 0
    chosen = {"optimizer": params["optimizer"]} if "optimizer" in params else {}
    return FusedOptimizerParams.from_fused_params(chosen, option.name).state_bytes(spec)


class ShadowEstimator(ShardEstimator):
    """Runs an estimator of TorchRec over options that may be of TT tables.

    Args:
        estimator: the estimator.
        topology: the devices planned for.
        cost: times of TT lookups; by default those of :meth:`TTLookupCost.default`.
    """

    def __init__(
        self, estimator: ShardEstimator, topology: Topology, cost: TTLookupCost | None = None
    ) -> None:
        """Builds it; see the class for the arguments."""
        if cost is not None and not isinstance(cost, TTLookupCost):
            raise TypeError(f"cost must be a TTLookupCost, got {type(cost).__name__}")
        device = topology.compute_device
        if cost is not None and cost.calibration is not None and not cost.is_measured(device):
            raise ValueError(
                f"cost: its calibration is of {cost.calibration.card}, for {device} devices "
                "expected one measured there, or none"
            )
        self._estimator = estimator
        self._topology = topology
        self._cost = TTLookupCost.default(topology.compute_device) if cost is None else cost

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        """Fill in storage or perf of every shard; other arguments are handed through."""
        specs = [tt_spec_of(option.tensor) for option in sharding_options]
        shadows = [
            option if spec is None else shadow_option(option, spec)
            for option, spec in zip(sharding_options, specs, strict=True)
        ]
        before = [[(s.storage, s.perf) for s in shadow.shards] for shadow in shadows]
        self._estimator.estimate(shadows, *args, **kwargs)
        together = call_lookups(sharding_options)
        for option, spec, shadow, previous in zip(
            sharding_options, specs, shadows, before, strict=True
        ):
            if spec is None:
                continue
            for shard, estimated, (storage, perf) in zip(
                option.shards, shadow.shards, previous, strict=True
            ):
                if estimated.storage is not storage:
                    shard.storage = self._exact_storage(
                        option, spec, estimated.storage, _fused_params(option, args, kwargs)
                    )
                if estimated.perf is not perf:
                    shard.perf = self._with_lookups(option, spec, estimated.perf, together)

    def _exact_storage(
        self,
        option: ShardingOption,
        spec: TTSpec,
        storage: Any,
        fused_params: Mapping[str, Any],
    ) -> Any:
        dtype = option.tensor.dtype
        charged = shadow_rows(spec) * spec.embedding_dim * dtype.itemsize
        exact = spec.num_bytes(dtype) + optimizer_bytes(option, spec, fused_params)
        result = copy.copy(storage)
        if self._topology.compute_device == "cpu":
            result.ddr += exact - charged
        else:
            result.hbm += exact - charged
        return result

    def _with_lookups(
        self, option: ShardingOption, spec: TTSpec, perf: Any, together: float
    ) -> Any:
        device = self._topology.compute_device
        load = LookupLoad(
            lookups=expected_lookups(option, self._topology),
            pooling_factor=sum(option.input_lengths) / max(len(option.input_lengths), 1),
            call_lookups=together,
        )
        forward = self._cost.forward_ms(spec, load, device)
        backward = self._cost.backward_ms(spec, load, device)
        result = copy.copy(perf)
        if self._cost.is_measured(device):
            result.fwd_compute, result.bwd_compute = forward, backward
        else:
            result.fwd_compute = max(perf.fwd_compute, forward)
            result.bwd_compute = max(perf.bwd_compute, backward)
        return result


def call_lookups(options: Sequence[ShardingOption]) -> float:
    """Lookups of all TT tables that a rank does in a batch, the tables evenly shared out.

    A table-wise table is looked up for the batches of all ranks, but by one rank of them, so each
    counts as often as a data-parallel one.
    """
    tables = {option.fqn: option for option in options if tt_spec_of(option.tensor) is not None}
    return sum(local_lookups(option) for option in tables.values())


def local_lookups(option: ShardingOption) -> float:
    """Rows of a table that the batch of one rank needs."""
    poolings: Sequence[float] = getattr(option, "num_poolings", None) or [1.0]
    if len(poolings) != len(option.input_lengths):
        poolings = [1.0] * len(option.input_lengths)
    found: float = option.batch_size * sum(
        length * pooling for length, pooling in zip(option.input_lengths, poolings, strict=True)
    )
    return found


def expected_lookups(option: ShardingOption, topology: Topology) -> float:
    """Rows of a table that one rank looks up in a batch."""
    if option.sharding_type == ShardingType.DATA_PARALLEL.value:
        return local_lookups(option)
    return local_lookups(option) * int(topology.world_size)


def _fused_params(
    option: ShardingOption, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Mapping[str, Any]:
    # The one further argument maps module types to sharders, or to a snapshot of them: TorchRec
    # changed which in 1.7, and both have fused_params.
    for value in (*args, *kwargs.values()):
        if isinstance(value, Mapping) and option_key(option) in value:
            params: Mapping[str, Any] = (
                getattr(value[option_key(option)], "fused_params", None) or {}
            )
            return params
    return {}


def option_key(option: ShardingOption) -> str:
    """The key of the option's module in a planner's map of sharders."""
    kind = type(option.module[1])
    return f"{kind.__module__}.{kind.__name__}"
