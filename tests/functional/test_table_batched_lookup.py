"""table_batched_tt_embedding_bag: many tables, wide indices, the fused step, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torchrec_flowtt.functional import (
    FusedUpdate,
    PoolingMode,
    rows,
    table_batched_tt_embedding_bag,
    to_dense,
    tt_embedding_bag,
)
from torchrec_flowtt.shapes import TTSpec

ADS = TTSpec(22, 12, (2, 3, 4), (2, 3, 2), (4, 5))
USERS = TTSpec(300, 8, (17, 18), (2, 4), (3,))


def make_cores(spec: TTSpec, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Gaussian cores that require a gradient."""
    generator = torch.Generator().manual_seed(spec.num_embeddings)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in spec.core_shapes
    ]


def arguments(**changes: Any) -> dict[str, Any]:
    """A valid call: features read the tables ads, users and ads again; B = 2."""
    return {
        "indices": torch.tensor([1, 21, 299, 0, 0, 1, 5, 7]),
        "offsets": torch.tensor([0, 2, 2, 3, 5, 6, 8]),
        "cores": [make_cores(ADS), make_cores(USERS)],
        "num_embeddings": [22, 300],
        "feature_table_map": [0, 1, 0],
        "pooling_mode": "sum",
        **changes,
    }


@pytest.mark.parametrize("mode", ["sum", "mean", PoolingMode.MEAN, 0])
def test_features_stand_side_by_side(mode: str | int | PoolingMode) -> None:
    call = arguments(pooling_mode=mode)
    output = table_batched_tt_embedding_bag(**call)
    ads, users = call["cores"]
    indices, offsets = call["indices"], call["offsets"]
    expected = torch.cat(
        [
            tt_embedding_bag(indices[:2], ads, offsets[:2], mode=PoolingMode.of(mode)),
            tt_embedding_bag(indices[2:5], users, offsets[2:4] - 2, mode=PoolingMode.of(mode)),
            tt_embedding_bag(indices[5:], ads, offsets[4:6] - 5, mode=PoolingMode.of(mode)),
        ],
        dim=1,
    )
    torch.testing.assert_close(output, expected)


def test_gradients_of_a_shared_table_add_up() -> None:
    call = arguments(per_sample_weights=torch.rand(8).requires_grad_())
    output = table_batched_tt_embedding_bag(**call)
    grad = torch.rand_like(output)
    output.backward(grad)
    exact = arguments()["cores"]
    ads, users = to_dense(exact[0], 22), to_dense(exact[1], 300)
    weights = call["per_sample_weights"].detach().double().requires_grad_()
    picked = [
        table[call["indices"][part]] * weights[part, None]
        for table, part in ((ads, slice(0, 2)), (users, slice(2, 5)), (ads, slice(5, 8)))
    ]
    zero_ads = torch.zeros(1, 12, dtype=torch.float64)
    expected = torch.cat(
        [
            torch.cat([picked[0].sum(0, keepdim=True), zero_ads]),
            torch.stack([picked[1][0], picked[1][1:].sum(0)]),
            torch.stack([picked[2][0], picked[2][1:].sum(0)]),
        ],
        dim=1,
    )
    torch.testing.assert_close(output, expected)
    expected.backward(grad)
    for table, exact_table in zip(call["cores"], exact, strict=True):
        for core, exact_core in zip(table, exact_table, strict=True):
            torch.testing.assert_close(core.grad, exact_core.grad)
    weights_grad = call["per_sample_weights"].grad
    assert weights_grad.dtype == torch.float32
    torch.testing.assert_close(weights_grad.double(), weights.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_cores", [2, 3, 4])
def test_indices_and_tables_beyond_32_bits(num_cores: int) -> None:
    spec = TTSpec.suggest(2**40 - 7, 6, tt_ranks=2, num_cores=num_cores)
    if num_cores == 2:  # rank one keeps the test small: the cores have a million slices each
        spec = TTSpec(2**40 - 7, 6, (2**20, 2**20), (2, 3), (1,))
    cores = make_cores(spec)
    indices = torch.tensor([0, 2**24 + 1, 2**31 + 1, 2**32 + 3, 2**39 + 12345, 2**40 - 8])
    output = tt_embedding_bag(indices[:, None], cores, num_embeddings=spec.num_embeddings)
    exact = [core.detach().clone().requires_grad_() for core in cores]
    expected = rows(exact, indices)
    torch.testing.assert_close(output, expected)
    grad = torch.rand_like(output)
    output.backward(grad)
    expected.backward(grad)
    for core, exact_core in zip(cores, exact, strict=True):
        torch.testing.assert_close(core.grad, exact_core.grad)


def test_the_fused_step_runs_once_on_the_summed_gradient() -> None:
    call = arguments()
    exact = arguments()
    update = FusedUpdate(
        "exact_adagrad",
        learning_rate=torch.tensor(0.1),
        iter=torch.tensor(0),
        momentum1=[torch.zeros_like(core) for table in call["cores"] for core in table],
    )
    output = table_batched_tt_embedding_bag(**call, update=update)
    output.sum().backward()
    table_batched_tt_embedding_bag(**exact).sum().backward()
    assert update.iter.item() == 1
    flat = [core for table in call["cores"] for core in table]
    flat_exact = [core for table in exact["cores"] for core in table]
    for core, exact_core, state in zip(flat, flat_exact, update.momentum1, strict=True):
        assert core.grad is None and exact_core.grad is not None
        torch.testing.assert_close(state, exact_core.grad.square())
        step = 0.1 * exact_core.grad / (state.sqrt() + 1e-8)
        # The learning rate is a float32 number.
        torch.testing.assert_close(core.detach(), exact_core.detach() - step, rtol=1e-6, atol=1e-7)


def test_the_weights_gradient_belongs_to_the_cores_before_the_step() -> None:
    update = FusedUpdate("exact_sgd", learning_rate=torch.tensor(1.0), iter=torch.tensor(0))
    weights = [torch.rand(8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    with torch.no_grad():
        weights[1].copy_(weights[0])
    fused, plain = (arguments(per_sample_weights=each) for each in weights)
    table_batched_tt_embedding_bag(**fused, update=update).sum().backward()
    table_batched_tt_embedding_bag(**plain).sum().backward()
    torch.testing.assert_close(weights[0].grad, weights[1].grad)
    assert not torch.equal(fused["cores"][0][0], plain["cores"][0][0])


def test_a_backward_without_a_gradient_for_the_output_takes_no_step() -> None:
    call = arguments()
    update = FusedUpdate("exact_sgd", learning_rate=torch.tensor(1.0), iter=torch.tensor(0))
    output = table_batched_tt_embedding_bag(**call, update=update)
    other = torch.ones(1, requires_grad=True)
    (other * 2).sum().backward()
    del output
    assert update.iter.item() == 0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_embeddings": [22]}, ValueError, "one entry a table, .* got 1 for 2 tables"),
        ({"cores": [], "num_embeddings": []}, ValueError, "at least one table"),
        ({"num_embeddings": [22, 307]}, ValueError, r"num_embeddings\[1\] must be 1 to 306.*307"),
        ({"num_embeddings": [22, 300.0]}, TypeError, r"num_embeddings\[1\] must be an integer"),
        ({"num_embeddings": [True, 300]}, TypeError, r"num_embeddings\[0\] must be an integer"),
        ({"feature_table_map": [0, 1.0, 0]}, TypeError, r"feature_table_map\[1\] must be an int"),
        ({"feature_table_map": [0, "1", 0]}, TypeError, r"feature_table_map\[1\] must be an int"),
        ({"feature_table_map": [0, 2, 0]}, ValueError, r"feature_table_map\[1\] .* got 2"),
        ({"feature_table_map": [0, -1, 0]}, ValueError, r"feature_table_map\[1\] .* got -1"),
        ({"feature_table_map": []}, ValueError, "at least one feature"),
        ({"pooling_mode": 3}, ValueError, "pooling mode must be one of"),
        (
            {"cores": [make_cores(ADS), make_cores(USERS, torch.float32)]},
            TypeError,
            r"cores\[1\] must have the dtype of cores\[0\]",
        ),
        (
            {"cores": [make_cores(ADS), make_cores(USERS)[::-1]]},
            ValueError,
            r"cores\[1\]\[0\] must have rank 1",
        ),
        (
            {"cores": [make_cores(ADS), [core.to("meta") for core in make_cores(USERS)]]},
            ValueError,
            r"cores\[1\] must be on the device of cores\[0\]",
        ),
        ({"offsets": torch.arange(6)}, ValueError, r"F \* B \+ 1 elements for the F = 3 features"),
        ({"output_dtype": torch.float16}, TypeError, "output_dtype must be one of torch.float64"),
    ],
)
def test_errors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        table_batched_tt_embedding_bag(**arguments(**changes))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_of_tables_of_different_columns_are_refused(device: str) -> None:
    """On every device, and only where features read the tables."""
    call = arguments(pooling_mode="none")
    call["cores"] = [[core.detach().to(device) for core in cores] for cores in call["cores"]]
    call |= {name: call[name].to(device) for name in ("indices", "offsets")}
    with pytest.raises(ValueError, match="table 0 has 12 and table 1 has 8"):
        table_batched_tt_embedding_bag(**call)
    call |= {"feature_table_map": [1, 1, 1]}
    assert table_batched_tt_embedding_bag(**call).shape == (8, 8)


def test_integer_like_arguments_are_taken() -> None:
    numpy = pytest.importorskip("numpy")
    call = arguments(
        num_embeddings=numpy.array([22, 300]), feature_table_map=numpy.array([0, 1, 0])
    )
    expected = table_batched_tt_embedding_bag(**arguments())
    assert torch.equal(table_batched_tt_embedding_bag(**call), expected)
