"""Bad batches of a sharded collection, on one rank; run by test_batch_errors.py."""

from __future__ import annotations

import pytest
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.bad_batches import (
    COUNT,
    IDS_OF_TT_TABLES,
    KEYS,
    LENGTHS,
    LENGTHS_AND_OFFSETS,
    NAMES_AND_TYPES,
    TABLES,
    Fault,
    assert_says,
    batch,
    batch_with_value,
)
from tests.distributed.sharded_models import Reference, shard
from tests.distributed.torchrun_launcher import run_on_rank


def model(weighted: bool = False) -> DistributedModelParallel:
    return shard(TABLES, weighted=weighted)


def assert_works(
    sharded: DistributedModelParallel, features: KeyedJaggedTensor | None = None
) -> None:
    """A good batch has the right embeddings."""
    features = batch() if features is None else features
    reference = Reference(TABLES)
    sharded.load_state_dict(reference.state_dict())
    pooled = sharded.module.sparse(features).to_dict()
    actual = torch.cat([pooled[name] for name in reference.names()], dim=1)
    torch.testing.assert_close(actual.double(), reference.output(features), rtol=1e-5, atol=1e-6)


def assert_refused(sharded: DistributedModelParallel, fault: Fault) -> None:
    with pytest.raises(fault.error) as raised:
        sharded(fault.make()).sum()
    assert_says(raised.value, fault.parts)


def names_and_types() -> None:
    """In the first batch and later; good batches are looked up right afterwards."""
    for fault in NAMES_AND_TYPES.values():
        sharded = model(fault.weighted)
        for _ in range(2):
            assert_refused(sharded, fault)
            assert_works(sharded, batch(fault.weighted))


def lengths_and_offsets() -> None:
    """In the first batch and later."""
    for fault in LENGTHS_AND_OFFSETS.values():
        sharded = model()
        for _ in range(2):
            assert_refused(sharded, fault)
            assert_works(sharded)


def ids() -> None:
    sharded = model()
    for position, feature, table, rows in IDS_OF_TT_TABLES:
        for value in (rows, -1):
            parts = (f"is '{feature}'", f"is '{table}'", f"0 to {rows - 1} ", f"got {value}")
            bad = Fault(lambda p=position, v=value: batch_with_value(p, v), IndexError, parts)
            assert_refused(sharded, bad)
            assert_works(sharded)


def order_of_keys() -> None:
    """Any order of keys, but the same in every batch; keys may follow that no table reads."""
    reordered = ["b", "shared", "a", "c", "d"]
    sharded = model()
    assert_works(sharded)
    parts = ("'a'", "'tt_a'", "key 0", "key 2")
    assert_refused(sharded, Fault(lambda: batch(keys=reordered), ValueError, parts))
    fewer = Fault(
        lambda: batch(keys=KEYS[:4], values=torch.arange(10), lengths=torch.tensor(LENGTHS[:8])),
        KeyError,
        ("'d'", "'fb'"),
    )
    assert_refused(sharded, fewer)
    assert_works(sharded)

    sharded = model()
    for _ in range(2):
        assert_works(sharded, batch(keys=reordered))
    more = batch(
        keys=[*reordered, "x"],
        values=torch.arange(COUNT + 1),
        lengths=torch.tensor([*LENGTHS, 0, 1]),
    )
    assert_works(sharded, more)


def unused_weights() -> None:
    """Whatever they are, the batch is that without them."""
    sharded = model()
    for weights in (torch.full((COUNT,), 0.5), torch.arange(COUNT), torch.ones(3)):
        features = batch(weights=weights)
        expected = sharded(batch())
        assert torch.equal(sharded(features), expected)
        assert features.weights() is weights


if __name__ == "__main__":
    checks = [names_and_types, lengths_and_offsets, ids, order_of_keys, unused_weights]
    run_on_rank({check.__name__: check for check in checks})
