"""TableBatchedFlowTTEmbeddingBags: shapes, state, conversions and errors."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from torchrec_flowtt.functional import PoolingMode
from torchrec_flowtt.modules import (
    FlowTTEmbeddingBag,
    OptimType,
    TableBatchedFlowTTEmbeddingBags,
    second_moment,
)
from torchrec_flowtt.shapes import TTSpec

ADS = TTSpec(22, 12, (2, 3, 4), (2, 3, 2), (4, 5), name="ads")
USERS = TTSpec(300, 8, (17, 18), (2, 4), (3,), name="users")
INDICES = torch.tensor([3, 21, 0, 0, 299, 7, 5])
# Two features (ads, users) of three bags each.
OFFSETS = torch.tensor([0, 2, 2, 3, 4, 7, 7])


def all_tensors(module: torch.nn.Module) -> list[Tensor]:
    """Parameters and buffers, also those that are not saved."""
    return [*module.parameters(), *module.buffers()]


def test_is_the_concatenation_of_single_tables() -> None:
    tables = TableBatchedFlowTTEmbeddingBags([ADS, USERS], feature_table_map=[1, 0, 1])
    ads, users = FlowTTEmbeddingBag(ADS, mode="sum"), FlowTTEmbeddingBag(USERS, mode="sum")
    for bag, cores in zip((ads, users), tables.split_tt_cores(), strict=True):
        bag.tt_cores = torch.nn.ParameterList(cores)
    lengths = torch.tensor([2, 0, 1, 3, 2, 0])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    indices = torch.tensor([299, 3, 5, 21, 0, 21, 4, 5])
    output = tables(indices, offsets)
    assert output.shape == (2, 8 + 12 + 8)
    torch.testing.assert_close(output[:, :8], users(indices[:2], offsets[:2]))
    torch.testing.assert_close(output[:, 8:20], ads(indices[2:6], offsets[2:4] - 2))
    torch.testing.assert_close(output[:, 20:], users(indices[6:], offsets[4:6] - 6))


@pytest.mark.parametrize("indices_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_integer_types(indices_dtype: torch.dtype, offsets_dtype: torch.dtype) -> None:
    tables = TableBatchedFlowTTEmbeddingBags([ADS, USERS], pooling_mode="mean")
    expected = tables(INDICES, OFFSETS)
    output = tables(INDICES.to(indices_dtype), OFFSETS.to(offsets_dtype))
    assert torch.equal(output, expected)
    assert output.shape == (3, 20)
    output.sum().backward()
    assert tables.iter.item() == 1


@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [
        ("exact_sgd", []),
        ("exact_adagrad", ["momentum1"]),
        ("exact_row_wise_adagrad", ["momentum1"]),
        ("adam", ["momentum1", "momentum2"]),
        ("none", []),
    ],
)
def test_optimizer_states_per_table_and_core(optimizer: str, moments: list[str]) -> None:
    tables = TableBatchedFlowTTEmbeddingBags(
        [ADS, USERS], optimizer=optimizer, weights_precision=torch.bfloat16
    )
    assert [len(cores) for cores in tables.split_tt_cores()] == [3, 2]
    states = tables.split_optimizer_states()
    assert [len(table) for table in states] == [3, 2]
    for cores, table in zip(tables.split_tt_cores(), states, strict=True):
        for core, state in zip(cores, table, strict=True):
            assert list(state) == moments
            for tensor in state.values():
                by_slice = optimizer == "exact_row_wise_adagrad"
                assert tensor.shape == (core.shape[:1] if by_slice else core.shape)
                assert tensor.dtype == torch.float32
                assert tensor.abs().sum() == 0
    if moments:
        # The tensors themselves: writing to them reaches the next step.
        states[1][0]["momentum1"].fill_(1.0)
        assert tables.state_dict()["momentum1_3"].sum() > 0
    assert hasattr(tables, "iter") == (optimizer != "none")


@pytest.mark.parametrize("optimizer", list(OptimType))
def test_state_dict_round_trip_continues_the_training(optimizer: OptimType) -> None:
    tables = TableBatchedFlowTTEmbeddingBags([ADS, USERS], optimizer=optimizer, learning_rate=0.1)
    tables(INDICES, OFFSETS).square().sum().backward()
    buffer = io.BytesIO()
    torch.save(tables.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer)
    assert {f"tt_cores.{k}" for k in range(5)} <= set(saved)
    assert "learning_rate_tensor" not in saved
    resumed = TableBatchedFlowTTEmbeddingBags(
        [ADS, USERS], optimizer=optimizer, learning_rate=0.1, device="meta"
    ).to_empty(device="cpu")
    resumed.load_state_dict(saved)
    tables.zero_grad()
    for model in (tables, resumed):
        model(INDICES, OFFSETS).square().sum().backward()
    for a, b in zip(all_tensors(tables), all_tensors(resumed), strict=True):
        torch.testing.assert_close(a, b)


def test_deepcopy_and_pickle_are_independent_and_equal() -> None:
    tables = TableBatchedFlowTTEmbeddingBags([ADS, USERS], optimizer="adam", learning_rate=0.1)
    tables.set_learning_rate(0.2)
    tables(INDICES, OFFSETS).sum().backward()
    copies = [copy.deepcopy(tables), pickle.loads(pickle.dumps(tables))]
    for copied in copies:
        assert copied.optimizer_config == tables.optimizer_config
        assert copied.learning_rate == 0.2
        for a, b in zip(all_tensors(copied), all_tensors(tables), strict=True):
            assert torch.equal(a, b)
            assert a.data_ptr() != b.data_ptr()
    for model in (tables, *copies):
        model(INDICES, OFFSETS).sum().backward()
    for copied in copies:
        for a, b in zip(all_tensors(copied), all_tensors(tables), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("optimizer", ["exact_adagrad", "exact_row_wise_adagrad", "adam"])
def test_conversion_keeps_the_optimizer_state_in_full_precision(optimizer: str) -> None:
    tables = TableBatchedFlowTTEmbeddingBags([ADS, USERS], optimizer=optimizer, learning_rate=0.001)
    tables(INDICES, OFFSETS).square().sum().backward()
    before = copy.deepcopy(tables.split_optimizer_states())
    tables.to(torch.bfloat16)
    assert tables.weights_precision == torch.bfloat16
    assert tables.learning_rate_tensor.dtype == torch.float32
    assert tables.learning_rate_tensor.item() == pytest.approx(0.001, rel=1e-6)
    assert tables.iter.dtype == torch.int64
    for old, new in zip(before, tables.split_optimizer_states(), strict=True):
        for old_state, new_state in zip(old, new, strict=True):
            for name, tensor in new_state.items():
                assert tensor.dtype == torch.float32
                assert torch.equal(tensor, old_state[name])
    tables(INDICES, OFFSETS).sum().backward()
    assert tables(INDICES, OFFSETS).dtype == torch.float32
    tables.double()
    assert tables(INDICES, OFFSETS).dtype == torch.float64
    assert tables.split_optimizer_states()[0][0]["momentum1"].dtype == torch.float64
    tables(INDICES, OFFSETS).sum().backward()
    assert tables.iter.item() == 3


def test_meta_construction_then_initialisation() -> None:
    huge = TTSpec.suggest(10**12, 64, tt_ranks=64, name="huge")
    tables = TableBatchedFlowTTEmbeddingBags([huge, ADS], optimizer="adam", device="meta")
    assert all(tensor.is_meta for tensor in all_tensors(tables))
    small = TableBatchedFlowTTEmbeddingBags(
        [ADS, USERS],
        optimizer="exact_adagrad",
        learning_rate=0.3,
        device="meta",
        init_variances=[1.0, 2.0],
    )
    small.to_empty(device="cpu")
    assert small.learning_rate_tensor.item() == pytest.approx(0.3)
    assert small.iter.item() == 0
    small.init_parameters()
    for cores, variance in zip(small.split_tt_cores(), (1.0, 2.0), strict=True):
        assert second_moment(cores) == pytest.approx(variance, rel=1e-5)
    small(INDICES, OFFSETS).sum().backward()
    assert small.split_optimizer_states()[0][0]["momentum1"].abs().sum() > 0
    small.init_parameters(torch.Generator().manual_seed(0))
    assert small.iter.item() == 0
    assert small.split_optimizer_states()[0][0]["momentum1"].abs().sum() == 0


def test_default_variances() -> None:
    tables = TableBatchedFlowTTEmbeddingBags([ADS, USERS])
    for cores, spec in zip(tables.split_tt_cores(), (ADS, USERS), strict=True):
        assert second_moment(cores) == pytest.approx(1 / (3 * spec.num_embeddings), rel=1e-5)


@pytest.mark.parametrize("weights", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("output", [torch.float32, torch.float16, torch.bfloat16])
def test_precisions(weights: torch.dtype, output: torch.dtype) -> None:
    tables = TableBatchedFlowTTEmbeddingBags(
        [ADS, USERS], weights_precision=weights, output_dtype=output
    )
    result = tables(INDICES, OFFSETS)
    assert result.dtype == output
    result.sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tables(INDICES, OFFSETS).dtype == output


def test_compiles_for_inference_and_breaks_the_graph_for_training() -> None:
    tables = TableBatchedFlowTTEmbeddingBags([ADS, USERS], optimizer="exact_adagrad")
    weights = torch.rand(7)
    compiled = torch.compile(tables, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(INDICES, OFFSETS, weights), tables(INDICES, OFFSETS, weights))
    eager = copy.deepcopy(tables)
    training = torch.compile(lambda *batch: tables(*batch).square().sum(), backend="aot_eager")
    for _ in range(2):
        training(INDICES, OFFSETS, weights).backward()
        eager(INDICES, OFFSETS, weights).square().sum().backward()
    assert tables.iter.item() == 2
    for a, b in zip(all_tensors(tables), all_tensors(eager), strict=True):
        torch.testing.assert_close(a, b)


def test_dense_mode_compiles_for_training() -> None:
    tables = TableBatchedFlowTTEmbeddingBags([ADS, USERS], optimizer=OptimType.NONE)
    compiled = torch.compile(tables, fullgraph=True, backend="aot_eager")
    compiled(INDICES, OFFSETS).square().sum().backward()
    grads = [core.grad for core in tables.tt_cores]
    tables.zero_grad()
    tables(INDICES, OFFSETS).square().sum().backward()
    torch.testing.assert_close(grads, [core.grad for core in tables.tt_cores])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"embedding_specs": []}, ValueError, "embedding_specs must hold at least one"),
        ({"embedding_specs": [(22, 12)]}, TypeError, r"embedding_specs\[0\] must be a TTSpec"),
        ({"feature_table_map": []}, ValueError, "feature_table_map must name a table"),
        ({"feature_table_map": [0.0]}, TypeError, r"feature_table_map\[0\] must be an int"),
        ({"feature_table_map": [True]}, TypeError, r"feature_table_map\[0\] must be an int"),
        (
            {"feature_names": "ad"},
            TypeError,
            "feature_names must have one string a feature, .* 'ad'",
        ),
        ({"feature_names": ["ad"]}, ValueError, "feature_names must have .* a feature, 2, got 1"),
        (
            {"feature_table_map": [0, 2]},
            ValueError,
            r"feature_table_map\[1\] must name a table, 0 to 1, got 2",
        ),
        ({"pooling_mode": "max"}, ValueError, "pooling mode must be one of"),
        ({"pooling_mode": "none"}, ValueError, "one embedding_dim .* table 0 has .* table 1 has"),
        ({"optimizer": "lamb"}, ValueError, "optimizer must be one of .* got 'lamb'"),
        ({"learning_rate": -1.0}, ValueError, "learning_rate must be finite"),
        ({"weight_decay": 0.1}, ValueError, "weight_decay must be 0 for optimizer 'exact_sgd'"),
        ({"weights_precision": torch.int8}, TypeError, "weights_precision must be one of"),
        ({"output_dtype": torch.float64}, TypeError, "output_dtype must be one of"),
        ({"output_dtype": None}, TypeError, "output_dtype must be one of .*, got None"),
        ({"output_dtype": "float32"}, TypeError, "output_dtype must be one of .*, got float32"),
        (
            {"weights_precision": torch.float64, "output_dtype": torch.int8},
            TypeError,
            "output_dtype must be one of .* for cores of torch.float64, got torch.int8",
        ),
        ({"init_variances": [1.0]}, ValueError, "one entry a table, 2, got 1"),
        ({"init_variances": [1.0, 0.0]}, ValueError, "variance must be positive"),
    ],
)
def test_constructor_errors(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TableBatchedFlowTTEmbeddingBags(**{"embedding_specs": [ADS, USERS], **changes})


@pytest.mark.parametrize(
    ("indices", "offsets", "weights", "error", "message"),
    [
        (INDICES[None], OFFSETS, None, ValueError, "indices must be 1-D"),
        (INDICES, OFFSETS[:-1], None, ValueError, r"F \* B \+ 1 elements for the F = 2 features"),
        (INDICES, OFFSETS[:0], None, ValueError, "offsets must be 1-D with"),
        (INDICES.float(), OFFSETS, None, TypeError, "indices must be int32 or int64"),
        (INDICES, OFFSETS, torch.ones(3), ValueError, "per_sample_weights must have the shape"),
        (INDICES + 1, OFFSETS, None, (IndexError, ValueError, RuntimeError), "22"),
        (INDICES - 1, OFFSETS, None, (IndexError, ValueError, RuntimeError), "-1"),
    ],
)
def test_call_errors(
    indices: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    error: type[Exception] | tuple[type[Exception], ...],
    message: str,
) -> None:
    tables = TableBatchedFlowTTEmbeddingBags([ADS, USERS])
    with pytest.raises(error, match=message):
        tables(indices, offsets, weights)


def test_set_learning_rate_checks() -> None:
    tables = TableBatchedFlowTTEmbeddingBags([ADS])
    with pytest.raises(ValueError, match="learning_rate must be finite"):
        tables.set_learning_rate(-1)
    with pytest.raises(ValueError, match="needs a fused optimizer"):
        TableBatchedFlowTTEmbeddingBags([ADS], optimizer="none").set_learning_rate(0.1)


def test_accepts_the_enums_of_fbgemm() -> None:
    configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
    ops = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    tables = TableBatchedFlowTTEmbeddingBags(
        [ADS],
        optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        pooling_mode=ops.PoolingMode.MEAN,
    )
    assert tables.optimizer is OptimType.EXACT_ROWWISE_ADAGRAD
    assert tables.pooling_mode is PoolingMode.MEAN


def test_repr() -> None:
    text = repr(TableBatchedFlowTTEmbeddingBags([ADS, USERS], optimizer="adam"))
    for part in ("tables=2", "features=2", "optimizer=adam", "learning_rate=0.01"):
        assert part in text
