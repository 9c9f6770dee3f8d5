"""Indices, tables and offsets beyond 2^24, 2^31 and 2^42: 64-bit arithmetic throughout."""

from __future__ import annotations

import pytest
import torch

import torchrec_flowtt.ops  # noqa: F401
from tests import reference
from tests.ops.random_calls import Call, Table, random_call, random_grad
from tests.ops.test_lookup_values import check_forward, check_gradients

# Small cores, many rows: the products of p are about 2^25, 2^33, 2^40 and 2^56. The last needs keys
# and positions side by side in the sort.
TABLES = {
    "2^25": Table((331, 317, 320), (2, 3, 2), (3, 2)),
    "2^33": Table((92683, 92683), (2, 2), (2,)),
    "2^40, N D > 2^43": Table((10331, 10333, 10337), (2, 2, 2), (2, 2)),
    "2^56": Table((16381, 16411, 16417, 16421), (2, 1, 2, 2), (2, 3, 2)),
}


def call_at_the_end(table: Table, weighted: bool) -> Call:
    """Lookups spread over the table, its first and last rows among them."""
    call = random_call([table], batch_size=200, longest_bag=6, weighted=weighted, seed=3)
    call.bags.indices[:2] = torch.tensor([0, table.rows - 1])
    return call


@pytest.mark.parametrize("name", TABLES)
def test_lookups_and_gradients(name: str) -> None:
    call = call_at_the_end(TABLES[name], weighted=True)
    assert int(call.bags.indices.max()) > 2**24
    check_forward(call, torch.float32)
    check_gradients(call, random_grad(call, torch.float32))


def test_tables_together_beyond_one_key_space() -> None:
    tables = [TABLES["2^56"]] * 3 + [
        Table((2**15, 2**15, 2**15, 2**14), (1, 2, 1, 1), (1, 1, 1))
    ] * 20
    call = random_call(tables, batch_size=3)
    check_forward(call, torch.float32)
    check_gradients(call, random_grad(call, torch.float32))


def test_update_of_far_slices() -> None:
    call = call_at_the_end(TABLES["2^33"], weighted=False)
    grad = random_grad(call, torch.float32)
    expected = [core.double() for core in call.cores]
    optimizer = reference.Optimizer("exact_sgd", learning_rate=0.5)
    reference.step(optimizer, expected, [], [], call.bags, grad, 1)
    rate, iteration = torch.tensor(0.5), torch.tensor(1)
    before = [core.clone() for core in call.cores]
    torch.ops.flowtt.tt_embedding_bag_backward_update(
        grad, call.cores, [], [], *call.bags.arguments(), rate, iteration, "exact_sgd", 0.0, 0.0,
        0.0, 0.0,
    )  # fmt: skip
    for k, touched in enumerate(reference.touched_slices(call.cores, call.bags)):
        torch.testing.assert_close(call.cores[k].double(), expected[k], rtol=1e-5, atol=1e-5)
        assert torch.equal(call.cores[k][~touched], before[k][~touched])
