"""The options a planner may choose from, for TT and uncompressed tables."""

from __future__ import annotations

from typing import Any

from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ShardingOption, Topology

from torchrec_flowtt.distributed.compat import enumerator_estimators
from torchrec_flowtt.distributed.plan_validation import TT_COMPUTE_KERNEL, TT_SHARDING_TYPES
from torchrec_flowtt.distributed.table_parameters import tt_spec_of
from torchrec_flowtt.planner.lookup_cost import TTLookupCost
from torchrec_flowtt.planner.shadow_estimators import ShadowEstimator


def is_valid_option(option: ShardingOption) -> bool:
    """Whether a table can be sharded so: TT tables by their kernel, others by any other."""
    if tt_spec_of(option.tensor) is None:
        return bool(option.compute_kernel != TT_COMPUTE_KERNEL)
    return option.compute_kernel == TT_COMPUTE_KERNEL and option.sharding_type in TT_SHARDING_TYPES


class FlowTTEmbeddingEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator, for models among whose tables some are TT tables.

    It offers TT tables their own kernel only, and other tables every kernel but that one, and
    wraps the estimators so that they know TT tables.

    Args:
        topology: the devices planned for.
        batch_size: examples a rank and batch.
        constraints: as TorchRec's.
        estimator: estimators to wrap; TorchRec's defaults if ``None``.
        cost: times of TT lookups; by default those of :meth:`TTLookupCost.default`.
        **kwargs: further arguments of ``EmbeddingEnumerator``.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int,
        constraints: dict[str, Any] | None = None,
        estimator: Any = None,
        cost: TTLookupCost | None = None,
        **kwargs: Any,
    ) -> None:
        """Builds it; see the class for the arguments."""
        super().__init__(topology, batch_size, constraints, estimator, **kwargs)
        estimators = enumerator_estimators(self)
        estimators[:] = [
            e if isinstance(e, ShadowEstimator) else ShadowEstimator(e, topology, cost)
            for e in estimators
        ]

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Remove the options a table does not have, then estimate the others.

        Raises:
            ValueError: if constraints leave a table without any option.
        """
        # The base class calls this on the list that it returns and caches.
        offered = {option.fqn: option for option in sharding_options}
        sharding_options[:] = [o for o in sharding_options if is_valid_option(o)]
        for fqn in offered.keys() - {option.fqn for option in sharding_options}:
            option = offered[fqn]
            if tt_spec_of(option.tensor) is None:
                expected = f"any compute kernel but {TT_COMPUTE_KERNEL!r}"
            else:
                expected = (
                    f"compute kernel {TT_COMPUTE_KERNEL!r} and sharding types "
                    f"{', '.join(TT_SHARDING_TYPES)}"
                )
            raise ValueError(
                f"table {fqn!r}: its ParameterConstraints leave no way to shard it. "
                f"It can have {expected}."
            )
        super().populate_estimates(sharding_options)
