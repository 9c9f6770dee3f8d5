"""The planner for models with TT tables."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from pyre_extensions import none_throws
from torch import nn
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

from torchrec_flowtt.distributed import compat
from torchrec_flowtt.distributed.embedding_configs import TTTableConfig
from torchrec_flowtt.distributed.feature_processed import (
    FlowTTFeatureProcessedEmbeddingBagCollectionSharder,
)
from torchrec_flowtt.distributed.plan_validation import TT_SHARDING_TYPES, refusal
from torchrec_flowtt.distributed.sharder import (
    FlowTTEmbeddingBagCollectionSharder,
    FlowTTEmbeddingCollectionSharder,
)
from torchrec_flowtt.distributed.tt_collection import (
    TTTableCollection,
    configs_of,
    has_tt_tables,
)
from torchrec_flowtt.planner.enumerator import FlowTTEmbeddingEnumerator
from torchrec_flowtt.planner.lookup_cost import TTLookupCost
from torchrec_flowtt.planner.placement import (
    PlacementRow,
    TableShape,
    placement_rows,
    table_shapes,
)
from torchrec_flowtt.planner.stats import FlowTTEmbeddingStats


class FlowTTEmbeddingShardingPlanner(EmbeddingShardingPlanner):
    """TorchRec's planner, for models among whose tables some are TT tables.

    TT tables are planned table-wise or data-parallel with their true bytes; the other tables as
    TorchRec plans them. ``DistributedModelParallel`` cannot make such a plan itself, so it gets
    this planner's result as ``plan=``.

    Args:
        *args: as for ``EmbeddingShardingPlanner``.
        cost: times of TT lookups; by default those of :meth:`TTLookupCost.default`.
        **kwargs: as for ``EmbeddingShardingPlanner``. An ``enumerator`` must be a
            :class:`FlowTTEmbeddingEnumerator`.

    Raises:
        TypeError: if an enumerator is given that does not know TT tables.
    """

    #: Tells the sharder that this planner knows TT tables.
    plans_tt_tables = True

    def __init__(self, *args: Any, cost: TTLookupCost | None = None, **kwargs: Any) -> None:
        """Builds it; see the class for the arguments."""
        given = inspect.signature(EmbeddingShardingPlanner.__init__).bind(None, *args, **kwargs)
        enumerator = given.arguments.get("enumerator")
        if enumerator is not None and not isinstance(enumerator, FlowTTEmbeddingEnumerator):
            raise TypeError(
                "FlowTTEmbeddingShardingPlanner: enumerator must be a FlowTTEmbeddingEnumerator, "
                f"got {type(enumerator).__name__}, which does not know TT tables"
            )
        if given.arguments.get("stats") is None:
            given.arguments["stats"] = FlowTTEmbeddingStats()
        super().__init__(*given.args[1:], **given.kwargs)
        if enumerator is None:
            topology, batch_size, constraints = compat.planner_parts(self)
            compat.set_enumerator(
                self, FlowTTEmbeddingEnumerator(topology, batch_size, constraints, cost=cost)
            )
        self._shapes: dict[tuple[str, str], TableShape] = {}

    def plan(self, module: nn.Module, sharders: Sequence[Any] | None = None) -> ShardingPlan:
        """A plan for `module`.

        Args:
            module: the model, on any device.
            sharders: the sharders to use; by default TorchRec's and that of TT tables.

        Raises:
            ValueError: if a collection with TT tables has no sharder for it, or constraints leave
                a table without any way to be sharded.
            PlannerError: if nothing fits into the topology.
        """
        sharders = self._prepare(module, sharders)
        return super().plan(module, sharders)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Sequence[Any] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """The plan that rank 0 makes, on every rank; an error there is raised on every rank too.

        Args:
            module: the model, on any device.
            sharders: the sharders to use; by default TorchRec's and that of TT tables.
            pg: process group, by default the world.

        Raises:
            ValueError: as :meth:`plan`.
            PlannerError: as :meth:`plan`.
            RuntimeError: if rank 0 failed in another way; the message is that of the failure.
        """
        sharders = self._prepare(module, sharders)
        if pg is None:
            if not dist.is_initialized():
                raise RuntimeError(
                    "collective_plan needs an initialised process group: call "
                    "torch.distributed.init_process_group() first, or use plan()"
                )
            pg = none_throws(dist.GroupMember.WORLD)
        outcome: list[Any] = [None]
        failure: Exception | None = None
        if dist.get_rank(pg) == 0:
            try:
                outcome[0] = ("plan", super().plan(module, sharders))
            except Exception as error:  # Handed to the other ranks, which wait for an answer.
                failure = error
                kind = getattr(error, "error_type", None)
                outcome[0] = ("error", type(error).__name__, str(error), kind)
        if dist.get_world_size(pg) > 1:
            dist.broadcast_object_list(outcome, src=dist.get_global_rank(pg, 0), group=pg)
        if failure is not None:
            raise failure
        if outcome[0][0] == "plan":
            plan: ShardingPlan = outcome[0][1]
            return plan
        _, name, message, kind = outcome[0]
        if name == PlannerError.__name__:
            raise PlannerError(message=message, error_type=kind)
        if name == ValueError.__name__:
            raise ValueError(message)
        raise RuntimeError(f"planning failed on rank 0: {name}: {message}")

    def placement_rows(self, plan: ShardingPlan) -> list[PlacementRow]:
        """The rows of a plan that this planner made: table, kernel, ranks, placement, bytes.

        Raises:
            KeyError: if the plan has a table of a model this planner has not planned.
        """
        return placement_rows(plan, self._shapes)

    def _prepare(self, module: nn.Module, sharders: Sequence[Any] | None) -> list[Any]:
        if sharders is None:
            sharders = [
                FlowTTEmbeddingBagCollectionSharder(),
                FlowTTEmbeddingCollectionSharder(),
                *get_default_sharders(),
                FlowTTFeatureProcessedEmbeddingBagCollectionSharder(),
            ]
        sharders = list(sharders)
        # On every rank, before any of them waits for another.
        check_sharders(module, [sharder.module_type for sharder in sharders])
        check_wrappers(module, sharders)
        check_constraints(module, compat.planner_parts(self)[2] or {})
        self._shapes = table_shapes(module, sharders)
        return sharders


def check_constraints(model: nn.Module, constraints: Mapping[str, Any]) -> None:
    """Check that constraints leave every TT table a sharding type that it has.

    Raises:
        ValueError: if not, with the reason for the first type asked for.
    """
    for module in model.modules():
        if not isinstance(module, TTTableCollection):
            continue
        for table in module.tt_tables():
            wanted = getattr(constraints.get(table), "sharding_types", None)
            if wanted and not set(wanted) & set(TT_SHARDING_TYPES):
                raise ValueError(refusal(table, wanted[0]))


def check_sharders(model: nn.Module, sharded_types: Sequence[type]) -> None:
    """Check that every collection with TT tables is one that can hold them and has a sharder.

    Raises:
        ValueError: if not.
    """
    for path, module in model.named_modules():
        tables = [config.name for config in configs_of(module) if isinstance(config, TTTableConfig)]
        if not tables:
            continue
        if not isinstance(module, TTTableCollection):
            kind = type(module).__name__
            raise ValueError(
                f"{path or 'the model'} is a plain {kind} with TT tables "
                f"{tables}, which it would hold uncompressed; make it a FlowTT{kind}"
            )
        if type(module) not in sharded_types:
            raise ValueError(
                f"{path or 'the model'} has TT tables {tables} and no sharder among those given; "
                f"add {type(module).__name__}Sharder() to sharders"
            )


def check_wrappers(model: nn.Module, sharders: Sequence[Any]) -> None:
    """Check that modules of TorchRec around TT tables can be sharded, and by these sharders.

    Raises:
        ValueError: if not.
    """
    sharder_of = {sharder.module_type: sharder for sharder in sharders}
    for path, module in model.named_modules():
        if not has_tt_tables(module):
            continue
        name = f"{path or 'the model'} is a {type(module).__name__} with TT tables"
        if isinstance(module, ManagedCollisionEmbeddingBagCollection):
            raise ValueError(
                f"{name}: TorchRec shards managed collisions row_wise only, and TT tables cannot "
                "be sharded so; give the TT tables a collection of their own, with hashed ids"
            )
        if isinstance(module, FeatureProcessedEmbeddingBagCollection) and not isinstance(
            sharder_of.get(type(module)), FlowTTFeatureProcessedEmbeddingBagCollectionSharder
        ):
            raise ValueError(
                f"{name}, which TorchRec's sharder for it does not know; add "
                "FlowTTFeatureProcessedEmbeddingBagCollectionSharder() behind the other sharders"
            )
