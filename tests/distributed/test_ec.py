from __future__ import annotations

import pytest
import torch
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.sequence_models import (
    SequenceModel,
    SequenceReference,
    SequenceTable,
)
from tests.distributed.sharded_models import batch
from torchrec_flowtt.distributed import FlowTTEmbeddingCollection, FlowTTEmbeddingConfig

TABLES = [
    SequenceTable("tt_a", "", ["a", "shared"], rows=60),
    SequenceTable("tt_b", "", ["b"], rows=47, ranks=(4,)),
    SequenceTable("fb_a", "", ["c", "shared"], tt=False),
]


def config(**kwargs: object) -> FlowTTEmbeddingConfig:
    fields = {"name": "t", "num_embeddings": 50, "embedding_dim": 8, "feature_names": ["f"]}
    return FlowTTEmbeddingConfig(**{**fields, "tt_ranks": 4, **kwargs})


def one_feature(values: list[int], lengths: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor(values), lengths=torch.tensor(lengths))


@pytest.mark.parametrize("need_indices", [False, True])
def test_output_and_gradients(need_indices: bool) -> None:
    reference = SequenceReference(TABLES)
    model = SequenceModel(TABLES, device="cpu", need_indices=need_indices)
    model.load_state_dict(reference.state_dict())
    features = batch(TABLES, rank=0, step=0)
    output, expected = model(features), reference.rows(features)
    assert set(output) == set(expected) == {"a", "shared@tt_a", "b", "c", "shared@fb_a"}
    for name, rows in expected.items():
        feature = features[name.split("@")[0]]
        torch.testing.assert_close(output[name].values().double(), rows, rtol=1e-5, atol=1e-6)
        assert output[name].values().dtype is torch.float32
        assert torch.equal(output[name].lengths(), feature.lengths())
        if need_indices:
            assert torch.equal(output[name].weights(), feature.values())
        else:
            assert output[name].weights_or_none() is None

    sum((jagged.values() ** 2).sum() for jagged in output.values()).backward()
    sum((rows**2).sum() for rows in expected.values()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad.double(), reference.parameters[name].grad, rtol=1e-4, atol=1e-4
        )


def test_state_dict_keys() -> None:
    keys = {f"sequence.embeddings.tt_a.tt_cores.{k}" for k in range(3)}
    keys |= {f"sequence.embeddings.tt_b.tt_cores.{k}" for k in range(2)}
    keys |= {"sequence.embeddings.fb_a.weight"}
    assert set(SequenceModel(TABLES).state_dict()) == keys
    assert set(SequenceModel(TABLES, device="cpu").state_dict()) == keys


def test_on_meta_nothing_is_allocated() -> None:
    tables = [
        config(name="huge", num_embeddings=10**12),
        EmbeddingConfig(name="large", num_embeddings=10**10, embedding_dim=8, feature_names=["g"]),
    ]
    collection = FlowTTEmbeddingCollection(device="meta", tables=tables)
    assert {p.device.type for p in collection.parameters()} == {"meta"}
    assert collection.device.type == "meta"


def test_a_table_larger_than_memory_works_eagerly() -> None:
    rows = 10**12
    huge = config(num_embeddings=rows, weight_init_min=-1.0, weight_init_max=1.0)
    collection = FlowTTEmbeddingCollection(tables=[huge])
    values = collection(one_feature([0, rows - 1], [2]))["f"].values()
    assert values.abs().sum(1).min() > 0
    with pytest.raises(IndexError, match=f"feature 'f'.*'t'.*{rows}"):
        collection(one_feature([rows], [1]))


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_low_precision_cores_give_float32_embeddings(data_type: DataType) -> None:
    collection = FlowTTEmbeddingCollection(tables=[config(data_type=data_type)])
    assert {core.dtype for core in collection.tt_cores("t")} == {config(data_type=data_type).dtype}
    assert collection(one_feature([1, 2], [2]))["f"].values().dtype is torch.float32


def test_kept_packed_cores() -> None:
    collection = FlowTTEmbeddingCollection(tables=[config()])
    with torch.no_grad():
        expected = collection(one_feature([1, 2], [2]))["f"].values()
        collection.keep_packed_cores()
        assert torch.equal(collection(one_feature([1, 2], [2]))["f"].values(), expected)
    assert collection.embeddings["t"]._packed_cores is not None


@pytest.mark.parametrize("size", [0, 3])
def test_batches_without_lookups(size: int) -> None:
    lengths = torch.zeros(4 * size, dtype=torch.int64)
    features = KeyedJaggedTensor(
        ["a", "shared", "b", "c"], torch.empty(0, dtype=torch.int64), lengths=lengths
    )
    for jagged in SequenceModel(TABLES, device="cpu")(features).values():
        assert jagged.values().shape == (0, 8)
        assert jagged.lengths().shape == (size,)


def test_wrong_batches_name_feature_and_table() -> None:
    collection = FlowTTEmbeddingCollection(
        tables=[
            config(),
            EmbeddingConfig(name="u", num_embeddings=5, embedding_dim=8, feature_names=["g"]),
        ]
    )

    def features(keys: list[str], values: list[int], lengths: list[int]) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(keys, torch.tensor(values), lengths=torch.tensor(lengths))

    with pytest.raises(IndexError, match="feature 'g', table 'u'"):
        collection(features(["f", "g"], [0, 5], [1, 1]))
    with pytest.raises(KeyError, match="feature 'g' of table 'u'"):
        collection(features(["f"], [0], [1]))
    with pytest.raises(ValueError, match="lengths must sum up"):
        collection(features(["f", "g"], [0, 1], [1, 2]))
    with pytest.raises(TypeError, match="int32 or int64"):
        collection(KeyedJaggedTensor(["f", "g"], torch.rand(2), lengths=torch.tensor([1, 1])))


def test_configuration() -> None:
    assert config(tt_ranks=(3, 2)).tt_spec.tt_ranks == (3, 2)
    with pytest.raises(ValueError, match="'t'.*tt_ranks"):
        config(tt_ranks=None)
    with pytest.raises(ValueError, match="'t'.*init_fn"):
        config(init_fn=torch.nn.init.ones_)
    with pytest.raises(ValueError, match="embedding dimension"):
        FlowTTEmbeddingCollection(tables=[config(), config(name="u", embedding_dim=16)])
    with pytest.raises(KeyError, match="fb_a"):
        SequenceModel(TABLES).sequence.tt_cores("fb_a")


def test_a_plain_collection_refuses_tt_tables() -> None:
    with pytest.raises(TypeError, match="FlowTTEmbeddingCollection instead of EmbeddingColl"):
        EmbeddingCollection(tables=[config()])
