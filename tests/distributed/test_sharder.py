from __future__ import annotations

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from tests.distributed.sharded_models import Table
from torchrec_flowtt.distributed import (
    FlowTTEmbeddingBagCollection,
    FlowTTEmbeddingBagCollectionSharder,
    ShardedFlowTTEmbeddingBagCollection,
)
from torchrec_flowtt.distributed.plan_validation import REFUSED_SHARDING_TYPES, TT_SHARDING_TYPES
from torchrec_flowtt.distributed.table_parameters import tt_spec_of

TABLES = [Table("tt", "", ["a"], rows=60, ranks=(3, 2)), Table("fb", "", ["b"], tt=False)]


def collection(device: str = "meta") -> FlowTTEmbeddingBagCollection:
    return FlowTTEmbeddingBagCollection(tables=[t.config() for t in TABLES], device=device)


def test_types() -> None:
    sharder = FlowTTEmbeddingBagCollectionSharder()
    assert sharder.module_type is FlowTTEmbeddingBagCollection
    assert sharder.sharded_module_type is ShardedFlowTTEmbeddingBagCollection


def test_fused_params_are_kept() -> None:
    params = {"learning_rate": 0.1}
    assert FlowTTEmbeddingBagCollectionSharder(fused_params=params).fused_params == params


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tt_kernel_is_offered_where_tt_tables_can_be_sharded(device: str) -> None:
    sharder = FlowTTEmbeddingBagCollectionSharder()
    torchrec = EmbeddingBagCollectionSharder()
    for sharding_type in (*TT_SHARDING_TYPES, *REFUSED_SHARDING_TYPES):
        kernels = torchrec.compute_kernels(sharding_type, device)
        extra = ["customized_kernel"] if sharding_type in TT_SHARDING_TYPES else []
        assert sharder.compute_kernels(sharding_type, device) == kernels + extra


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_shardable_parameters(device: str) -> None:
    ebc = collection(device)
    parameters = FlowTTEmbeddingBagCollectionSharder().shardable_parameters(ebc)
    assert list(parameters) == ["tt", "fb"]
    assert parameters["tt"].shape == (60, 8)
    assert parameters["tt"].device.type == "meta"
    assert tt_spec_of(parameters["tt"]) == ebc.tt_tables()["tt"].tt_spec
    assert parameters["fb"] is ebc.embedding_bags["fb"].weight
    assert tt_spec_of(parameters["fb"]) is None


def test_optimizers_in_backward_reach_the_parameter() -> None:
    ebc = collection()
    _apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.1})
    parameter = FlowTTEmbeddingBagCollectionSharder().shardable_parameters(ebc)["tt"]
    assert parameter._optimizer_classes == [torch.optim.Adagrad]
    assert parameter._optimizer_kwargs == [{"lr": 0.1}]
    # TorchRec writes into it; the cores' own must not change.
    parameter._optimizer_kwargs[0]["learning_rate"] = 1.0
    assert ebc.tt_cores("tt")[0]._optimizer_kwargs == [{"lr": 0.1}]


def test_cores_with_different_optimizers_are_refused() -> None:
    ebc = collection()
    first, *others = ebc.tt_cores("tt")
    _apply_optimizer_in_backward(torch.optim.SGD, [first], {"lr": 0.1})
    _apply_optimizer_in_backward(torch.optim.Adagrad, others, {"lr": 0.1})
    with pytest.raises(ValueError, match="'tt'.*different in-backward optimizers"):
        FlowTTEmbeddingBagCollectionSharder().shardable_parameters(ebc)
