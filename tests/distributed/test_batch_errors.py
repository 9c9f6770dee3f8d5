"""Errors about a batch name the feature and the table."""

from __future__ import annotations

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed import bad_batches
from tests.distributed.bad_batches import (
    IDS_OF_TT_TABLES,
    KEYS,
    LENGTHS_AND_OFFSETS,
    NAMES_AND_TYPES,
    TABLES,
    assert_says,
    batch,
    batch_with_value,
)
from tests.distributed.torchrun_launcher import Outcomes, run_script
from torchrec_flowtt.distributed import FlowTTEmbeddingBagCollection
from torchrec_flowtt.distributed.batch_requirements import BatchRequirements

FAULTS = {**NAMES_AND_TYPES, **LENGTHS_AND_OFFSETS}


def collection(weighted: bool = False) -> FlowTTEmbeddingBagCollection:
    return FlowTTEmbeddingBagCollection([t.config() for t in TABLES], is_weighted=weighted)


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str) -> None:
    fault = FAULTS[name]
    with pytest.raises(fault.error) as raised:
        collection(fault.weighted)(fault.make())
    assert_says(raised.value, fault.parts)


@pytest.mark.parametrize("beyond", [True, False])
@pytest.mark.parametrize(("position", "feature", "table", "rows"), IDS_OF_TT_TABLES)
def test_ids_outside_tt_tables(
    position: int, feature: str, table: str, rows: int, beyond: bool
) -> None:
    value = rows if beyond else -1
    with pytest.raises(IndexError) as raised:
        collection()(batch_with_value(position, value))
    assert_says(raised.value, (f"'{feature}'", f"'{table}'", f"0 to {rows - 1} ", f"got {value}"))
    named = [
        name for name in (*KEYS, *(t.name for t in TABLES)) if f"'{name}'" in str(raised.value)
    ]
    assert named == [feature, table]


@pytest.mark.parametrize("value", [50, -1])
def test_ids_outside_uncompressed_tables(value: int) -> None:
    with pytest.raises((IndexError, RuntimeError)) as raised:
        collection()(batch_with_value(10, value))
    assert_says(raised.value, ("'d'", "'fb'", str(value)))


def test_many_features_are_not_all_listed() -> None:
    table = bad_batches.Table("t", "", [f"f{i}" for i in range(30)])
    ebc = FlowTTEmbeddingBagCollection([table.config()], is_weighted=True)
    features = KeyedJaggedTensor(
        list(table.features), torch.arange(30), lengths=torch.ones(30).int()
    )
    with pytest.raises(ValueError, match=r"'f7' and 22 more of tables 't'"):
        ebc(features)
    with pytest.raises(KeyError, match=r"'f8' of table 't' and 21 more: .* got 'x'"):
        collection_keys = BatchRequirements([table.config()], is_weighted=False)
        collection_keys.check_keys(["x", "f0"])


def test_a_good_batch_is_looked_up_once() -> None:
    ebc = collection()
    calls = []
    for table in TABLES:
        ebc.embedding_bags[table.name].register_forward_hook(lambda *_: calls.append(None))
    ebc(batch())
    assert len(calls) == sum(len(table.features) for table in TABLES)


def test_features_of_no_table_are_allowed() -> None:
    features = batch(
        keys=[*KEYS, "x"],
        values=torch.arange(bad_batches.COUNT + 1),
        lengths=torch.tensor([*bad_batches.LENGTHS, 0, 1]),
    )
    ebc = collection()
    assert torch.equal(ebc(features).values(), ebc(batch()).values())


@pytest.mark.parametrize(("weighted", "has_weights"), [(False, False), (False, True), (True, True)])
def test_compiles_as_one_graph(weighted: bool, has_weights: bool) -> None:
    ebc = collection(weighted)
    compiled = torch.compile(ebc, fullgraph=True, backend="aot_eager")
    features = batch(has_weights)
    torch.testing.assert_close(compiled(features).values(), ebc(features).values())


def test_tensors_of_other_devices_are_not_read() -> None:
    requirements = BatchRequirements([t.config() for t in TABLES], is_weighted=False)
    features = batch(lengths=torch.tensor(bad_batches.LENGTHS) - 1).to(torch.device("meta"))
    requirements.explain(features, RuntimeError())


CHECKS = ["names_and_types", "lengths_and_offsets", "ids", "order_of_keys", "unused_weights"]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return run_script("ranks_bad_batches.py", ranks=1)


@pytest.mark.parametrize("check", CHECKS)
def test_sharded(outcomes: Outcomes, check: str) -> None:
    outcomes.require(check)
