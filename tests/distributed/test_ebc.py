from __future__ import annotations

import pytest
import torch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.sharded_models import Reference, Table, batch
from torchrec_flowtt.distributed import FlowTTEmbeddingBagCollection, FlowTTEmbeddingBagConfig
from torchrec_flowtt.modules import second_moment

TABLES = [
    Table("tt_a", "", ["a", "shared"], rows=60),
    Table("tt_b", "", ["b"], rows=47, dim=12, mean=True, ranks=(4,)),
    Table("fb_a", "", ["c", "shared"], tt=False),
    Table("fb_b", "", ["d"], tt=False, mean=True),
]


def collection(tables: list[Table], **kwargs: object) -> FlowTTEmbeddingBagCollection:
    return FlowTTEmbeddingBagCollection(tables=[t.config() for t in tables], **kwargs)


@pytest.mark.parametrize("weighted", [False, True])
def test_output_and_gradients(weighted: bool) -> None:
    # torch's EmbeddingBag takes no weights with the mean, so FBGEMM tables pool by sum then.
    tables = [t for t in TABLES if not (weighted and t.mean and not t.tt)]
    reference = Reference(tables)
    ebc = collection(tables, is_weighted=weighted)
    prefix = "sparse."
    ebc.load_state_dict({k[len(prefix) :]: v for k, v in reference.state_dict().items()})
    features = batch(tables, rank=0, step=0, weighted=weighted)
    output = ebc(features)
    expected = reference.output(features)
    assert output.keys() == reference.names()
    torch.testing.assert_close(output.values().double(), expected, rtol=1e-5, atol=1e-6)

    (output.values() ** 2).sum().backward()
    (expected**2).sum().backward()
    for name, parameter in ebc.named_parameters():
        torch.testing.assert_close(
            parameter.grad.double(), reference.parameters[prefix + name].grad, rtol=1e-4, atol=1e-4
        )


def test_kept_packed_cores() -> None:
    ebc = collection(TABLES)
    features = batch(TABLES, rank=0, step=0)
    with torch.no_grad():
        expected = ebc(features).values()
        ebc.keep_packed_cores()
        for _ in range(2):
            assert torch.equal(ebc(features).values(), expected)
            ebc.refresh_packed_cores()
    bags = [ebc.embedding_bags[table] for table in ebc.tt_tables()]
    assert len(bags) == 2 and all(bag._packed_cores is not None for bag in bags)
    ebc.keep_packed_cores(False)
    assert all(bag._packed_cores is None for bag in bags)


def test_state_dict_keys() -> None:
    keys = {f"embedding_bags.tt_a.tt_cores.{k}" for k in range(3)}
    keys |= {f"embedding_bags.tt_b.tt_cores.{k}" for k in range(2)}
    keys |= {"embedding_bags.fb_a.weight", "embedding_bags.fb_b.weight"}
    assert set(collection(TABLES).state_dict()) == keys
    assert set(collection(TABLES, device="meta").state_dict()) == keys


def test_on_meta_nothing_is_allocated() -> None:
    ebc = FlowTTEmbeddingBagCollection(
        device="meta",
        tables=[
            FlowTTEmbeddingBagConfig(
                name="huge",
                num_embeddings=10**12,
                embedding_dim=256,
                feature_names=["f"],
                tt_ranks=16,
            ),
            EmbeddingBagConfig(
                name="large", num_embeddings=10**9, embedding_dim=256, feature_names=["g"]
            ),
        ],
    )
    assert {p.device.type for p in ebc.parameters()} == {"meta"}
    assert ebc.device.type == "meta"
    assert ebc.embedding_bags["large"].weight.shape == (10**9, 256)


def test_a_table_larger_than_memory_works_eagerly() -> None:
    rows = 10**12
    ebc = FlowTTEmbeddingBagCollection(
        tables=[
            FlowTTEmbeddingBagConfig(
                name="huge",
                num_embeddings=rows,
                embedding_dim=64,
                feature_names=["f"],
                tt_ranks=4,
                weight_init_min=-1.0,
                weight_init_max=1.0,
            )
        ]
    )
    features = KeyedJaggedTensor(
        keys=["f"], values=torch.tensor([0, rows - 1]), lengths=torch.tensor([1, 1])
    )
    assert ebc(features)["f"].abs().sum(1).min() > 0
    with pytest.raises(IndexError, match=str(rows)):
        ebc(KeyedJaggedTensor(["f"], torch.tensor([rows]), lengths=torch.tensor([1])))


def test_initial_variance_follows_the_config() -> None:
    def made(**kwargs: float) -> float:
        ebc = FlowTTEmbeddingBagCollection(
            tables=[
                FlowTTEmbeddingBagConfig(
                    name="t",
                    num_embeddings=1000,
                    embedding_dim=16,
                    feature_names=["f"],
                    tt_ranks=8,
                    **kwargs,
                )
            ]
        )
        return second_moment(ebc.tt_cores("t"))

    assert made() == pytest.approx(1 / 3000, rel=1e-4)
    assert made(weight_init_min=-0.6, weight_init_max=0.6) == pytest.approx(0.12, rel=1e-4)


def test_uncompressed_tables_are_initialised_by_their_init_fn() -> None:
    ebc = FlowTTEmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name="t",
                num_embeddings=10,
                embedding_dim=4,
                feature_names=["f"],
                init_fn=torch.nn.init.ones_,
            )
        ]
    )
    assert torch.equal(ebc.embedding_bags["t"].weight, torch.ones(10, 4))


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_low_precision_cores_give_float32_embeddings(data_type: DataType) -> None:
    config = FlowTTEmbeddingBagConfig(
        name="t",
        num_embeddings=50,
        embedding_dim=8,
        feature_names=["f"],
        tt_ranks=4,
        data_type=data_type,
    )
    ebc = FlowTTEmbeddingBagCollection(tables=[config])
    assert {core.dtype for core in ebc.tt_cores("t")} == {config.dtype}
    features = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([2]))
    assert ebc(features)["f"].dtype is torch.float32


def test_one_name_for_two_tables_is_refused() -> None:
    with pytest.raises(ValueError, match="tt_a"):
        collection([TABLES[0], TABLES[0]])


def test_tt_cores_of_another_table() -> None:
    with pytest.raises(KeyError, match="fb_a"):
        collection(TABLES).tt_cores("fb_a")


def test_is_a_collection_of_torchrec() -> None:
    ebc = collection(TABLES)
    assert isinstance(ebc, EmbeddingBagCollection)
    assert set(ebc.tt_tables()) == {"tt_a", "tt_b"}
    assert not ebc.is_weighted()
