from __future__ import annotations

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig

from torchrec_flowtt.distributed import (
    FlowTTEmbeddingBagCollection,
    FlowTTEmbeddingBagCollectionSharder,
    FlowTTEmbeddingBagConfig,
)
from torchrec_flowtt.planner import ArithmeticRate, FlowTTEmbeddingEnumerator, TTLookupCost
from torchrec_flowtt.planner.shadow_estimators import (
    expected_lookups,
    shadow_option,
    shadow_rows,
)
from torchrec_flowtt.shapes import TTSpec

BATCH, WORLD = 512, 2
INDEX_BYTES, FLOAT_BYTES = 8, 4


def collection(data_type: DataType = DataType.FP32) -> FlowTTEmbeddingBagCollection:
    return FlowTTEmbeddingBagCollection(
        device="meta",
        tables=[
            FlowTTEmbeddingBagConfig(
                name="tt",
                num_embeddings=100_000_000,
                embedding_dim=64,
                feature_names=["a"],
                tt_ranks=(16, 16),
                data_type=data_type,
            ),
            EmbeddingBagConfig(
                name="fb", num_embeddings=1000, embedding_dim=64, feature_names=["b"]
            ),
        ],
    )


def options(
    device: str = "cuda",
    fused_params: dict | None = None,
    ebc: FlowTTEmbeddingBagCollection | None = None,
    cost: TTLookupCost | None = None,
    constraints: dict | None = None,
) -> dict[tuple[str, str, str], ShardingOption]:
    topology = Topology(world_size=WORLD, compute_device=device)
    enumerator = FlowTTEmbeddingEnumerator(topology, BATCH, constraints, cost=cost)
    module = torch.nn.Module()
    module.sparse = collection() if ebc is None else ebc
    found = enumerator.enumerate(
        module, [FlowTTEmbeddingBagCollectionSharder(fused_params=fused_params)]
    )
    return {(o.name, o.sharding_type, o.compute_kernel): o for o in found}


def tt_option(sharding_type: str, **kwargs: object) -> ShardingOption:
    return options(**kwargs)["tt", sharding_type, "customized_kernel"]


def spec() -> TTSpec:
    return collection().tt_tables()["tt"].tt_spec


def input_and_output_bytes(sharding_type: str) -> int:
    bags = BATCH * (WORLD if sharding_type == "table_wise" else 1)
    return bags * (INDEX_BYTES + 64 * FLOAT_BYTES)


OPTIMIZERS = [
    (None, lambda s: 0),
    (EmbOptimType.EXACT_SGD, lambda s: 0),
    (EmbOptimType.EXACT_ADAGRAD, lambda s: 4 * s.num_parameters),
    (EmbOptimType.EXACT_ROWWISE_ADAGRAD, lambda s: 4 * sum(s.p_shapes)),
    (EmbOptimType.ADAM, lambda s: 8 * s.num_parameters),
]


@pytest.mark.parametrize(("optimizer", "state_bytes"), OPTIMIZERS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_table_wise_storage_is_that_of_cores_and_optimizer(
    device: str, optimizer: EmbOptimType | None, state_bytes
) -> None:
    params = {} if optimizer is None else {"optimizer": optimizer}
    option = tt_option("table_wise", device=device, fused_params=params)
    (shard,) = option.shards
    expected = spec().num_bytes() + state_bytes(spec()) + input_and_output_bytes("table_wise")
    here, elsewhere = (
        (shard.storage.ddr, shard.storage.hbm)
        if device == "cpu"
        else (shard.storage.hbm, shard.storage.ddr)
    )
    assert here == expected
    assert elsewhere in (0, input_and_output_bytes("table_wise"))


def test_data_parallel_storage_is_that_of_the_cores_on_every_rank() -> None:
    option = tt_option("data_parallel", fused_params={"optimizer": EmbOptimType.ADAM})
    assert len(option.shards) == WORLD
    expected = spec().num_bytes() + input_and_output_bytes("data_parallel")
    assert [shard.storage.hbm for shard in option.shards] == [expected] * WORLD


@pytest.mark.parametrize("sharding_type", ["table_wise", "data_parallel"])
def test_optimizers_in_backward_are_charged(sharding_type: str) -> None:
    ebc = collection()
    _apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.1})
    shard = tt_option(sharding_type, ebc=ebc).shards[0]
    expected = 2 * spec().num_bytes() + input_and_output_bytes(sharding_type)
    assert shard.storage.hbm == expected


def test_half_precision_cores_take_half_the_bytes() -> None:
    full = tt_option("table_wise", fused_params={"optimizer": EmbOptimType.EXACT_ADAGRAD})
    half = tt_option(
        "table_wise",
        ebc=collection(DataType.FP16),
        fused_params={"optimizer": EmbOptimType.EXACT_ADAGRAD},
    )
    saved_cores = spec().num_bytes(torch.float32) - spec().num_bytes(torch.float16)
    # TorchRec takes the output to have the table's element size.
    saved_output = BATCH * WORLD * 64 * 2
    saved = full.shards[0].storage.hbm - half.shards[0].storage.hbm
    assert saved == saved_cores + saved_output


def test_nothing_of_a_tt_table_has_the_size_of_the_table() -> None:
    uncompressed = 100_000_000 * 64 * 4
    for (name, _, _), option in options().items():
        if name == "tt":
            for shard in option.shards:
                assert shard.storage.hbm < uncompressed / 1000
                assert shard.storage.ddr < uncompressed / 1000


def test_options_of_each_table() -> None:
    found = options(device="cpu")
    assert {k[1:] for k in found if k[0] == "tt"} == {
        ("table_wise", "customized_kernel"),
        ("data_parallel", "customized_kernel"),
    }
    kernels = {k[2] for k in found if k[0] == "fb"}
    assert kernels == {"fused", "dense"}


def test_uncompressed_tables_are_estimated_as_torchrec_does() -> None:
    option = options()["fb", "table_wise", "fused"]
    expected = 1000 * 64 * 4 + input_and_output_bytes("table_wise")
    assert option.shards[0].storage.hbm == expected


def test_communication_is_that_of_the_embeddings_or_of_the_cores() -> None:
    found = options()
    tt = found["tt", "table_wise", "customized_kernel"].shards[0].perf
    fb = found["fb", "table_wise", "fused"].shards[0].perf
    assert tt.fwd_comms == pytest.approx(fb.fwd_comms)
    assert tt.bwd_comms == pytest.approx(fb.bwd_comms)
    tt = found["tt", "data_parallel", "customized_kernel"].shards[0].perf
    fb = found["fb", "data_parallel", "dense"].shards[0].perf
    elements = shadow_rows(spec()) * 64
    # All-reduce of the core gradients: proportional to their elements.
    assert tt.bwd_comms / elements == pytest.approx(fb.bwd_comms / (1000 * 64), rel=1e-6)


def test_compute_is_at_least_the_arithmetic() -> None:
    cost = TTLookupCost(rates={"cuda": ArithmeticRate(forward=1e3, backward=1e3)})
    found = options(cost=cost)
    option = found["tt", "table_wise", "customized_kernel"]
    flops = spec().flops_per_lookup * BATCH * WORLD
    assert option.shards[0].perf.fwd_compute == pytest.approx(flops / 1e3)
    assert option.shards[0].perf.bwd_compute == pytest.approx(3 * flops / 1e3)
    option = found["tt", "data_parallel", "customized_kernel"]
    assert option.shards[0].perf.fwd_compute == pytest.approx(flops / WORLD / 1e3)

    free = TTLookupCost(rates={})
    perf = options(cost=free)["tt", "table_wise", "customized_kernel"].shards[0].perf
    same = options(cost=free)["fb", "table_wise", "fused"].shards[0].perf
    assert perf.fwd_compute == pytest.approx(same.fwd_compute)


def test_pooling_factors_count() -> None:
    constraints = {"tt": ParameterConstraints(pooling_factors=[20.0])}
    option = tt_option("table_wise", constraints=constraints)
    topology = Topology(world_size=WORLD, compute_device="cuda")
    assert expected_lookups(option, topology) == 20.0 * BATCH * WORLD


def test_shadow_leaves_the_option_alone() -> None:
    option = tt_option("data_parallel")
    shadow = shadow_option(option, spec())
    assert option.tensor.shape == (100_000_000, 64)
    assert option.compute_kernel == "customized_kernel"
    assert shadow.tensor.shape == (shadow_rows(spec()), 64)
    assert shadow.compute_kernel == "dense"
    assert shadow_rows(spec()) * 64 - spec().num_parameters in range(64)
    assert all(a is not b for a, b in zip(option.shards, shadow.shards, strict=True))
