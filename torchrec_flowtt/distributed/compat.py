"""Every private TorchRec name the package leans on, and the probes that check them.

TorchRec has no public way to add an embedding kernel, so a few underscore names are needed. They
are read and overridden through this module only, which makes the surface visible in one place:
:func:`check_torchrec` runs when :mod:`torchrec_flowtt.distributed` is imported and names what is
missing, instead of a failure deep inside a training job. Paths are chosen by what a class offers
rather than by version number.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import embeddingbag
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_lookup import (
    GroupedEmbeddingsLookup,
    GroupedPooledEmbeddingsLookup,
)
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.planners import EmbeddingPlannerBase
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardingEnv2D,
)

from torchrec_flowtt.versions import require_torchrec

# Methods that are overridden: (class, method, argument names the override relies on).
_OVERRIDDEN: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (GroupedPooledEmbeddingsLookup, "_create_embedding_kernel", ("config", "device", "pg")),
    (ShardedEmbeddingBagCollection, "_initialize_torch_state", ()),
    (ShardedEmbeddingBagCollection, "input_dist", ("ctx", "features")),
    (ShardedEmbeddingBagCollection, "reset_parameters", ()),
    (
        ShardedEmbeddingBagCollection,
        "create_embedding_bag_sharding",
        ("sharding_infos", "env", "device", "permute_embeddings", "qcomm_codecs_registry"),
    ),
    (GroupedEmbeddingsLookup, "_create_embedding_kernel", ("config", "device", "pg")),
    (ShardedEmbeddingCollection, "_initialize_torch_state", ()),
    (ShardedEmbeddingCollection, "input_dist", ("ctx", "features")),
    (ShardedEmbeddingCollection, "reset_parameters", ()),
    (
        ShardedEmbeddingCollection,
        "create_embedding_sharding",
        ("sharding_type", "sharding_infos", "env", "device", "qcomm_codecs_registry"),
    ),
    (EmbeddingEnumerator, "populate_estimates", ("sharding_options",)),
    (EmbeddingStats, "_log_sharding_plan", ("best_plan",)),
    (
        ShardedTensor,
        "_init_from_local_shards_and_global_metadata",
        ("local_shards", "sharded_tensor_metadata", "process_group"),
    ),
)


def check_torchrec() -> None:
    """Check the installed TorchRec against the names this package needs.

    Raises:
        ImportError: if TorchRec or FBGEMM is missing or outside the supported releases, or if a
            method that is overridden is gone or has lost an argument.
    """
    require_torchrec()
    for owner, name, arguments in _OVERRIDDEN:
        method = getattr(owner, name, None)
        if method is None:
            raise ImportError(
                f"this TorchRec has no {owner.__name__}.{name}, which torchrec-flowtt overrides; "
                "TorchRec 1.6 to 1.9 have it"
            )
        missing = set(arguments) - set(inspect.signature(method).parameters)
        if missing:
            raise ImportError(
                f"{owner.__name__}.{name} of this TorchRec takes no {sorted(missing)}, which "
                "torchrec-flowtt relies on; TorchRec 1.6 to 1.9 work"
            )


def _private(owner: object, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise ImportError(
            f"{type(owner).__name__} of this TorchRec has no attribute {name!r}, which "
            "torchrec-flowtt relies on; TorchRec 1.6 to 1.9 work"
        ) from None


# -- sharded modules and lookups ---------------------------------------------------------------


def bind_kernel_arguments(
    create: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Name the arguments of a call of ``_create_embedding_kernel``, whatever their order."""
    return dict(inspect.signature(create).bind(*args, **kwargs).arguments)


def unwrapped_lookups(sharded: nn.Module) -> list[nn.Module]:
    """Lookups of a sharded collection, one a sharding type, without DistributedDataParallel."""
    lookups = []
    for lookup in _private(sharded, "_lookups"):
        while isinstance(lookup, DistributedDataParallel):
            lookup = lookup.module
        lookups.append(lookup)
    return lookups


def group_embeddings(lookup: nn.Module, features: Any) -> tuple[list[Any], list[torch.Tensor]]:
    """The features of each group of tables of a lookup, and their embeddings."""
    groups = features.split(_private(lookup, "_feature_splits"))
    return groups, _private(lookup, "_forward")(groups)


def embedding_kernels(lookup: nn.Module) -> list[nn.Module]:
    """The embedding kernels of a lookup, one a group of tables."""
    return list(_private(lookup, "_emb_modules"))


def sharding_env(sharded: nn.Module) -> Any:
    """The ShardingEnv of a sharded collection."""
    return _private(sharded, "_env")


def fused_optimizers(sharded: nn.Module) -> list[Any]:
    """Key and optimizer of every kernel of a sharded collection that steps in backward."""
    return list(_private(sharded, "_optim").optimizers)


def compute_device(sharded: nn.Module) -> torch.device | None:
    """The device of a sharded collection's lookups."""
    return cast("torch.device | None", _private(sharded, "_device"))


def table_configs(sharded: nn.Module) -> list[Any]:
    """Configurations of all tables of a sharded EBC or EC."""
    return cast("list[Any]", _private(sharded, _configs_attribute(sharded)))


def _configs_attribute(sharded: nn.Module) -> str:
    is_pooled = isinstance(sharded, ShardedEmbeddingBagCollection)
    return "_embedding_bag_configs" if is_pooled else "_embedding_configs"


def lookup_groups(sharding: Any, device: torch.device | None) -> dict[str, Any]:
    """The groups of tables that a sharding has on this rank, and the device of their lookup."""
    return {
        "grouped_configs": _private(sharding, "_grouped_embedding_configs"),
        "device": _private(sharding, "_device") if device is None else device,
    }


def processed_collection(feature_processed: nn.Module) -> Any:
    """The collection inside a feature-processed one, sharded or not."""
    return _private(feature_processed, "_embedding_bag_collection")


def place_on_meta(sharding_infos: list[Any]) -> None:
    """Point the placements of tables at the meta device, as TorchRec does for its own tables."""
    embeddingbag.replace_placement_with_meta_device(sharding_infos)


def uses_index_dedup(sharder: Any) -> bool:
    """Whether an EmbeddingCollectionSharder removes repeated ids before the exchange."""
    return bool(_private(sharder, "_use_index_dedup"))


def is_two_dimensional(env: Any) -> bool:
    """Whether `env` is that of DMPCollection."""
    return isinstance(env, ShardingEnv2D)


def module_order(sharder: Any) -> dict[str, Any]:
    """The order of sharding types that a sharder prescribes, where this TorchRec has one."""
    name = "sharded_module_order_overwrite"
    accepted = inspect.signature(ShardedEmbeddingBagCollection.__init__).parameters
    return {name: getattr(sharder, "_" + name)} if name in accepted else {}


@contextlib.contextmanager
def restricted_to(sharded: nn.Module, keep: Callable[[Any], bool]) -> Iterator[None]:
    """Let the base class see only the tables for which `keep` holds, for its own methods."""
    attribute = _configs_attribute(sharded)
    configs = _private(sharded, attribute)
    setattr(sharded, attribute, [config for config in configs if keep(config)])
    try:
        yield
    finally:
        setattr(sharded, attribute, configs)


def summed_row_wise_features(sharded: nn.Module) -> dict[str, list[str]]:
    """Pooling type to features whose mean pooling TorchRec applies after the all-to-all.

    TorchRec divides *every* feature of an EBC by its bag lengths as soon as one row-wise table
    pools by mean, except for the features listed under ``"SUM"``, where it lists row-wise tables
    only. The caller adds the features that are already pooled.
    """
    return cast("dict[str, list[str]]", _private(sharded, "_pooling_type_to_rs_features"))


def register_state_hooks(
    module: nn.Module, after_save: Callable[..., None], before_load: Callable[..., None]
) -> None:
    """Register hooks that rewrite a module's state dict after saving and before loading."""
    module._register_state_dict_hook(after_save)
    module._register_load_state_dict_pre_hook(before_load, with_module=True)


def sharded_tensor(
    local_shards: list[Shard], metadata: ShardedTensorMetadata, process_group: Any
) -> ShardedTensor:
    """A ShardedTensor over tensors that already exist, without any collective."""
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local_shards=local_shards,
        sharded_tensor_metadata=metadata,
        process_group=process_group,
    )


def clear_local_chunks(tensor: DTensor) -> None:
    """Make a DTensor without a shard on this rank say so, whatever its number of dimensions.

    TorchRec's wrapper of no shards lists one chunk of size 0 x 0, on which
    torch.distributed.checkpoint fails for a tensor that is not two-dimensional.
    """
    _private(_private(tensor, "_local_tensor"), "_storage_meta").chunks.clear()


def copy_skip_grad_sync(source: nn.Module, target: nn.Module) -> None:
    """Carry TorchRec 1.9's mark that data-parallel tables are not to be wrapped in DDP."""
    attribute = "_torchrec_data_parallel_skip_grad_sync"
    if hasattr(source, attribute):
        setattr(target, attribute, getattr(source, attribute))


# -- planner -----------------------------------------------------------------------------------


def with_tensor(option: ShardingOption, tensor: torch.Tensor) -> None:
    """Replace the tensor that a sharding option describes."""
    _private(option, "_tensor")
    option._tensor = tensor


def stats_lines(stats: EmbeddingStats) -> list[str]:
    """The lines of the report that `stats` built last; appending to it extends the report."""
    return cast("list[str]", _private(stats, "_stats_table"))


def planner_parts(planner: EmbeddingPlannerBase) -> tuple[Any, int, Any]:
    """Topology, batch size and constraints of a planner."""
    return (
        _private(planner, "_topology"),
        _private(planner, "_batch_size"),
        _private(planner, "_constraints"),
    )


def set_enumerator(planner: EmbeddingPlannerBase, enumerator: EmbeddingEnumerator) -> None:
    """Replace the enumerator of a planner."""
    _private(planner, "_enumerator")
    planner._enumerator = enumerator


def enumerator_estimators(enumerator: EmbeddingEnumerator) -> list[Any]:
    """The estimators of an enumerator, in the order they run; the list can be changed."""
    return cast("list[Any]", _private(enumerator, "_estimators"))


def model_planned_by_torchrec() -> nn.Module | None:
    """The model that the caller is about to plan without knowing TT tables, if so.

    DistributedModelParallel without ``plan=`` runs TorchRec's planner on rank 0 while the other
    ranks wait for its answer, so an error there reaches rank 0 alone. The one thing every rank
    does first is to ask each sharder for its module type. There is no argument from which a
    sharder could tell who asks; hence this looks at the callers.

    Returns:
        The model, on every rank when DistributedModelParallel was given no plan, and on the
        planning rank when TorchRec's planner was called directly. ``None`` in all other cases.
    """
    frame = sys._getframe(1)
    for _ in range(12):
        caller = frame.f_back
        if caller is None:
            return None
        frame = caller
        owner = frame.f_locals.get("self")
        if isinstance(owner, EmbeddingPlannerBase):
            if getattr(owner, "plans_tt_tables", False):
                return None
        elif not (
            isinstance(owner, DistributedModelParallel)
            and frame.f_code.co_name == "__init__"
            and "plan" in frame.f_locals
            and frame.f_locals["plan"] is None
        ):
            continue
        module = frame.f_locals.get("module")
        if isinstance(module, nn.Module):
            return module
    return None
