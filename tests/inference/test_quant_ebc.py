"""Quantised collections with TT tables: values, order, precision, what is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensorBase
from torchrec.distributed.global_settings import get_propogate_device, set_propogate_device
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.quant_embeddingbag import ShardedQuantEmbeddingBagCollection
from torchrec.inference.modules import (
    DEFAULT_QUANT_MAPPING,
    assign_weights_to_tbe,
    get_table_to_weights_from_tbe,
    quantize_inference_model,
    set_pruning_data,
    shard_quant_model,
)
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from torchrec.quant.embedding_modules import (
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.inference.served_models import (
    KEYS,
    LONGEST_BAG,
    Model,
    batch,
    collection,
    fb_table,
    mixed_tables,
    tt_expected,
    tt_table,
)
from tests.tolerances import assert_close
from torchrec_flowtt.distributed import FlowTTEmbeddingBagCollection, FlowTTEmbeddingBagConfig
from torchrec_flowtt.functional import to_dense
from torchrec_flowtt.inference import (
    QuantFlowTTEmbeddingBagCollection,
    flowtt_quantization_mapping,
)

# Of one looked-up element in [-1, 1]: half a step of 8 bits, and fp16's rounding of scale and bias.
INT8_ERROR = 0.5 * 2 / 255 + 2 * 2**-11


def quantized(model: nn.Module, **kwargs: object) -> Model:
    """A quantised copy of a model."""
    return quantize_inference_model(
        copy.deepcopy(model), quantization_mapping=flowtt_quantization_mapping(), **kwargs
    )


def stock(ebc: FlowTTEmbeddingBagCollection, **kwargs: object) -> Model:
    """What TorchRec makes of the same tables, all uncompressed."""
    configs = [
        EmbeddingBagConfig(
            name=config.name,
            num_embeddings=config.num_embeddings,
            embedding_dim=config.embedding_dim,
            feature_names=config.feature_names,
            pooling=config.pooling,
        )
        for config in ebc.embedding_bag_configs()
    ]
    dense = EmbeddingBagCollection(tables=configs, is_weighted=ebc.is_weighted())
    with torch.no_grad():
        for name, bag in dense.embedding_bags.items():
            if name in ebc.tt_tables():
                bag.weight.copy_(to_dense(ebc.tt_cores(name), bag.num_embeddings))
            else:
                bag.weight.copy_(ebc.embedding_bags[name].weight)
    return quantize_inference_model(Model(dense), **kwargs)


def check_against_stock_and_float(
    model: Model, tested: Model, like: Model, features: KeyedJaggedTensor
) -> None:
    """Keys and columns are TorchRec's; uncompressed values too, TT values are the float ones."""
    output, expected = tested(features), like(features)
    assert output.keys() == expected.keys()
    assert output.length_per_key() == expected.length_per_key()
    assert output.values().shape == expected.values().shape
    assert output.values().dtype == expected.values().dtype
    with torch.no_grad():
        unquantized = model(features)
    size = output.values().shape[0]
    for config in model.sparse.embedding_bag_configs():
        for feature in config.feature_names:
            shared = f"{feature}@{config.name}"
            key = shared if shared in output.keys() else feature  # noqa: SIM118 (a list)
            if isinstance(config, FlowTTEmbeddingBagConfig):
                cores = tested.sparse.tt_cores(config.name)
                truth = tt_expected(config, cores, features, feature)
                assert_close(output[key], truth, key, slack=2)
            else:
                assert torch.equal(output[key], expected[key]), key
                error = (output[key].float() - unquantized[key]).abs()
                assert size == 0 or error.max() <= 1.5 * LONGEST_BAG * INT8_ERROR
                assert size < 5 or error.max() > 0  # or it would not be quantised


@pytest.mark.parametrize("size", [5, 1, 0])
@pytest.mark.parametrize("weighted", [False, True])
def test_output_is_that_of_the_tables(size: int, weighted: bool) -> None:
    model = Model(collection(mixed_tables(weighted), weighted))
    features = batch(size, weighted=weighted)
    check_against_stock_and_float(model, quantized(model), stock(model.sparse), features)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_batches_in_other_forms(dtype: torch.dtype) -> None:
    """The order of the keys may change, though TorchRec's module remembers its first batch's."""
    model = Model(collection(mixed_tables()))
    tested = quantized(model)
    for keys in (KEYS, KEYS[::-1], sorted(set(KEYS) - {"unused"})):
        features = batch(6, keys=keys, dtype=dtype)
        check_against_stock_and_float(model, tested, stock(model.sparse), features)


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """TorchRec's sharded inference on the CPU."""
    before = get_propogate_device()
    set_propogate_device(True)
    yield
    set_propogate_device(before)


def copy_shards(sharded: nn.Module, unsharded: nn.Module) -> None:
    """Gives every shard its part of the table, TorchRec's loading of a quantised state dict."""
    whole = unsharded.state_dict()
    for key, value in sharded.state_dict().items():
        if "embedding_bags" not in key:
            continue
        if isinstance(value, list):  # scales and biases of columns: each shard has them all
            for tensor in value:
                tensor.copy_(whole[key])
        elif not isinstance(value, ShardedTensorBase):
            value.copy_(whole[key])
        else:
            for shard in value.local_shards():
                part = whole[key]
                for dim, offset in enumerate(shard.metadata.shard_offsets):
                    part = part.narrow(dim, offset, shard.tensor.shape[dim])
                shard.tensor.copy_(part)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("sharding_type", [None, "column_wise", "row_wise"])
def test_only_uncompressed_tables_are_sharded(sharding_type: str | None) -> None:
    # TorchRec's row-wise inference adds up the means of the parts of a bag.
    tables = mixed_tables(sharding_type == "row_wise")
    tables[0] = fb_table("wide", ["a", "s"], 256)
    model = Model(collection(tables))
    if sharding_type is not None:
        # State dicts of which parts of a table can be taken, scales and biases included.
        quant_prep_enable_quant_state_dict_split_scale_bias_for_types(
            model, [FlowTTEmbeddingBagCollection]
        )
    unsharded = quantized(model)
    constraints = None
    if sharding_type is not None:
        constraints = {
            name: ParameterConstraints([sharding_type], ["quant"])
            for name in unsharded.sparse.uncompressed.embedding_bags
        }
    sharded = copy.deepcopy(unsharded)
    weights = get_table_to_weights_from_tbe(sharded)
    sharded, plan = shard_quant_model(
        sharded,
        world_size=2,
        compute_device="cpu",
        sharding_device="cpu",
        constraints=constraints,
    )
    module_plan = plan.plan["sparse.uncompressed"]
    assert list(plan.plan) == ["sparse.uncompressed"]
    assert sorted(module_plan) == ["fb_1", "fb_2", "wide"]
    assert isinstance(sharded.sparse.uncompressed, ShardedQuantEmbeddingBagCollection)
    if sharding_type is None:
        assert {tuple(sharding.ranks) for sharding in module_plan.values()} == {(0,), (1,)}
        assign_weights_to_tbe(sharded, weights)
    else:
        copy_shards(sharded, unsharded)
    for size in (5, 1):
        features = batch(size)
        output, expected = sharded(features), unsharded(features)
        assert output.keys() == expected.keys()
        assert torch.equal(output.values(), expected.values())


def test_precision_of_cores() -> None:
    """A table's own dtype, else the one for all tables, else that of the training."""
    tables = [
        tt_table("own", ["a"]),
        tt_table("all", ["b"]),
        tt_table("trained", ["c"], data_type=DataType.BF16),
    ]
    model = Model(collection(tables))

    def dtypes(**kwargs: object) -> dict[str, torch.dtype]:
        ebc = quantized(model, **kwargs).sparse
        configs = {config.name: config.data_type for config in ebc.embedding_bag_configs()}
        found = {name: ebc.tt_cores(name)[0].dtype for name in ("own", "all", "trained")}
        assert {name: str(data_type) for name, data_type in configs.items()} == {
            name: {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}[str(dtype)[6:]]
            for name, dtype in found.items()
        }
        assert not any(core.requires_grad for name in found for core in ebc.tt_cores(name))
        return found

    fp32, fp16, bf16 = torch.float32, torch.float16, torch.bfloat16
    assert dtypes() == {"own": fp32, "all": fp32, "trained": bf16}
    assert dtypes(per_table_weight_dtype={"own": fp16}) == {
        "own": fp16,
        "all": fp32,
        "trained": bf16,
    }
    assert dtypes(quantization_dtype=fp16, per_table_weight_dtype={"own": bf16}) == {
        "own": bf16,
        "all": fp16,
        "trained": fp16,
    }


@pytest.mark.parametrize("core_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.float16])
def test_values_in_every_precision(core_dtype: torch.dtype, output_dtype: torch.dtype) -> None:
    model = Model(collection(mixed_tables()))
    own = dict.fromkeys(model.sparse.tt_tables(), core_dtype)
    tested = quantized(model, per_table_weight_dtype=own, output_dtype=output_dtype)
    like = stock(model.sparse, output_dtype=output_dtype)
    check_against_stock_and_float(model, tested, like, batch(7))
    assert tested(batch(7)).values().dtype == output_dtype
    assert tested.sparse.output_dtype() == output_dtype
    # The rounding of the cores is all that there is between the served and the trained table.
    for table in own:
        for served, trained in zip(
            tested.sparse.tt_cores(table), model.sparse.tt_cores(table), strict=True
        ):
            assert torch.equal(served, trained.to(core_dtype))


def test_one_kind_of_tables_only() -> None:
    features = batch(4)
    only_tt = Model(collection([tt_table("t", ["b", "c"])]))
    tested = quantized(only_tt)
    assert tested.sparse.uncompressed is None
    with torch.no_grad():
        expected = only_tt(features)
    assert tested(features).keys() == expected.keys() == ["b", "c"]
    assert torch.equal(tested(features).values(), expected.values())

    only_fb = Model(collection([fb_table("t", ["b", "c"])]))
    output, expected = quantized(only_fb)(features), stock(only_fb.sparse)(features)
    assert output.keys() == expected.keys()
    assert torch.equal(output.values(), expected.values())


def test_the_mapping_is_complete() -> None:
    mapping = flowtt_quantization_mapping()
    assert DEFAULT_QUANT_MAPPING.items() < mapping.items()
    pair = nn.ModuleDict(
        {
            "mixed": collection(mixed_tables()),
            "plain": EmbeddingBagCollection(tables=[fb_table("p", ["a"])]),
        }
    )
    # TorchRec's own mapping leaves the first as it is, and says nothing.
    half = quantize_inference_model(copy.deepcopy(pair))
    assert type(half["mixed"]) is FlowTTEmbeddingBagCollection
    whole = quantize_inference_model(pair, quantization_mapping=mapping)
    assert type(whole["mixed"]) is QuantFlowTTEmbeddingBagCollection
    assert type(whole["mixed"].uncompressed) is type(whole["plain"]) is QuantEmbeddingBagCollection


def test_quantised_tables_are_copies_of_their_own() -> None:
    model = Model(collection(mixed_tables()))
    tested = quantize_inference_model(
        Model(model.sparse), quantization_mapping=flowtt_quantization_mapping()
    )
    features = batch(5)
    before = tested(features).values().clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(tested(features).values(), before)
    assert torch.equal(copy.deepcopy(tested)(features).values(), before)


def test_built_on_meta_and_loaded() -> None:
    tested = quantized(Model(collection(mixed_tables())))
    on_meta = quantized(Model(collection(mixed_tables(), device="meta")))
    assert {p.device.type for p in on_meta.parameters()} == {"meta"}
    assert set(on_meta.state_dict()) == set(tested.state_dict())
    assert on_meta.sparse.tt_groups.sum_float32.tt_cores[0].is_meta
    torch.manual_seed(8)
    other = quantized(Model(FlowTTEmbeddingBagCollection(tables=mixed_tables())))
    features = batch(5)
    assert not torch.equal(other(features).values(), tested(features).values())
    other.load_state_dict(tested.state_dict())
    assert torch.equal(other(features).values(), tested(features).values())


def test_kept_packed_cores() -> None:
    ebc = quantized(Model(collection(mixed_tables()))).sparse
    features = batch(5)
    expected = ebc(features).values()
    ebc.keep_packed_cores()
    ebc.refresh_packed_cores()
    assert torch.equal(ebc(features).values(), expected)
    assert all(group._packed_cores is not None for group in ebc.tt_groups.values())
    ebc.keep_packed_cores(False)
    assert all(group._packed_cores is None for group in ebc.tt_groups.values())


def test_what_a_tt_table_cannot_do_is_refused() -> None:
    model = Model(collection(mixed_tables()))
    with pytest.raises(ValueError, match=r"'tt_1': per_table_weight_dtype .* got torch.qint8"):
        quantized(model, per_table_weight_dtype={"tt_1": torch.qint8})
    with pytest.raises(TypeError, match=r"'tt_0', 'tt_1', 'tt_2': output_dtype .* torch.quint8"):
        quantized(model, output_dtype=torch.quint8)
    pruned = set_pruning_data(copy.deepcopy(model), {"tt_2": 9}, [FlowTTEmbeddingBagCollection])
    with pytest.raises(ValueError, match=r"'tt_2': rows cannot be pruned.* 9 rows"):
        quantized(pruned)
    for largest in (7e4, 1e-6):
        large = copy.deepcopy(model)
        with torch.no_grad():
            core = large.sparse.tt_cores("tt_0")[1]
            core.mul_(largest / core.abs().max())
        with pytest.raises(ValueError, match=r"'tt_0': the largest element of core 1 .* got"):
            quantized(large, quantization_dtype=torch.float16)
        quantized(large, per_table_weight_dtype={"tt_0": torch.bfloat16})
    with pytest.raises(ValueError, match="a qconfig, got none"):
        QuantFlowTTEmbeddingBagCollection.from_float(model.sparse)
    with pytest.raises(TypeError, match="expected a FlowTTEmbeddingBagCollection, got Linear"):
        QuantFlowTTEmbeddingBagCollection.from_float(nn.Linear(1, 1))
    with pytest.raises(KeyError, match="no TT table 'fb_0'; TT tables are"):
        quantized(model).sparse.tt_cores("fb_0")


def test_pruned_uncompressed_tables() -> None:
    model = Model(collection(mixed_tables()))
    set_pruning_data(model, {"fb_0": 9}, [FlowTTEmbeddingBagCollection])
    ebc = quantized(model).sparse
    assert ebc.uncompressed.embedding_bags["fb_0"].weight.shape[0] == 9
    assert ebc.embedding_bag_configs()[0].num_embeddings_post_pruning == 9


def test_errors_of_batches_name_features_and_tables() -> None:
    tested = quantized(Model(collection(mixed_tables())))
    good = batch(3)
    with pytest.raises(KeyError, match="feature 'e' of table 'tt_2'"):
        tested(batch(3, keys=[key for key in KEYS if key != "e"]))
    values = good.values().clone()
    values[good.offset_per_key()[KEYS.index("c")]] = 60
    with pytest.raises(IndexError, match=r"feature 0 is 'c', table 0 is 'tt_1'"):
        tested(KeyedJaggedTensor(KEYS, values, lengths=good.lengths()))
    with pytest.raises(TypeError, match="expected a KeyedJaggedTensor, got dict"):
        tested({})
    variable = KeyedJaggedTensor(
        KEYS,
        torch.zeros(9, dtype=torch.int64),
        lengths=torch.ones(9, dtype=torch.int64),
        stride_per_key_per_rank=[[2]] + [[1]] * 7,
    )
    with pytest.raises(ValueError, match="one batch size for all features"):
        tested(variable)
