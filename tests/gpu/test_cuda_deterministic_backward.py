"""The backward pass in deterministic mode: values, and the same bits in every run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.gpu.calls import MEAN, NONE, SUM, Call, Table, make_call
from tests.gpu.expected import are_equal, assert_matches, expect
from tests.gpu.shapes import SMALL, TABLES
from tests.gpu.training import OPTIMIZERS, Training, assert_step_matches
from torchrec_flowtt.functional import tt_embedding_bag
from torchrec_flowtt.modules import TableBatchedFlowTTEmbeddingBags
from torchrec_flowtt.shapes import TTSpec

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
# One of them has a fast backward kernel, whose place the deterministic pass takes.
SHARED = [
    Table((20, 22, 25), (4, 4, 8), (32, 32)),
    Table((70, 90), (8, 4), (12,)),
    Table((9, 8, 7, 6), (2, 2, 3, 2), (5, 8, 4)),
    Table((20, 22, 25), (4, 8, 4), (64, 50)),
]
RUNS = 5


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check(call: Call, grad: Tensor | None = None, slack: float = 1.0) -> None:
    grad = call.grad_output() if grad is None else grad
    found = call.backward(grad, deterministic=True)
    for actual, wanted in zip(found, expect(call).gradients(grad)[0], strict=True):
        assert_matches(actual, wanted, slack)


def skewed_call(seed: int = 1, batch_size: int = 3000, **options: object) -> Call:
    """Several tables with features that share them; of each a tenth of the lookups is one row."""
    features = [0, 1, 0, 2, 3, 3]
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 8, (len(features) * batch_size,), generator=generator)
    ids = []
    for table, of_feature in zip(features, lengths.reshape(len(features), -1), strict=True):
        drawn = torch.randint(0, SHARED[table].rows, (int(of_feature.sum()),), generator=generator)
        drawn[::10] = 77
        ids += drawn.tolist()
    return make_call(
        SHARED,
        feature_table_map=features,
        batch_size=batch_size,
        lengths=lengths.tolist(),
        ids=ids,
        device="cuda",
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tables(name: str, dtype: torch.dtype) -> None:
    group = TABLES[name]
    call = group.call(dtype=dtype, weighted=True, device="cuda")
    check(call)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("pooling_mode", [SUM, MEAN])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_pooling(name: str, pooling_mode: int, index_dtype: torch.dtype) -> None:
    group = TABLES[name]
    call = group.call(
        batch_size=9,
        max_length=7,
        pooling_mode=pooling_mode,
        index_dtype=index_dtype,
        offset_dtype=torch.int32,
        device="cuda",
    )
    check(call)


@pytest.mark.parametrize("table", SHARED, ids=lambda table: f"{len(table.p)} cores")
def test_rows_without_pooling(table: Table) -> None:
    call = make_call(
        [table], feature_table_map=[0, 0], batch_size=400, pooling_mode=NONE, device="cuda"
    )
    check(call, slack=2)


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda grad: grad.t().contiguous().t(),
    "every second column": lambda grad: torch.repeat_interleave(grad, 2, 1)[:, ::2],
    "one row expanded": lambda grad: grad[:1].expand_as(grad),
    "half": Tensor.half,
    "bfloat16": Tensor.bfloat16,
}


@pytest.mark.parametrize("form", STRIDED)
def test_forms_of_grad_output(form: str) -> None:
    group = TABLES["features share tables"]
    call = group.call(device="cuda")
    check(call, STRIDED[form](call.grad_output()))


def test_one_row_looked_up_many_times() -> None:
    call = make_call(
        TABLES["three cores"].tables,
        batch_size=2000,
        lengths=[10] * 2000,
        ids=[17] * 20_000,
        weighted=True,
        device="cuda",
    )
    check(call, slack=10)


def test_more_than_one_range_of_lookups() -> None:
    """2^18 lookups are sorted at once; the last range has few."""
    count = 3 * 2**18 + 5
    table = Table((50, 60), (2, 2), (3,))
    call = make_call([table], batch_size=count, lengths=[1] * count, device="cuda")
    check(call, slack=10)
    grad = call.grad_output()
    assert are_equal([call.backward(grad, deterministic=True) for _ in range(RUNS)])


def test_ids_above_2_31() -> None:
    table = Table((2000, 2000, 2000), (2, 2, 2), (4, 4))
    ids = [table.rows - 1, 2**31 - 1, 2**31, 2**32, 2**32 + 12_345, 0]
    check(make_call([table], batch_size=3, lengths=[3, 0, 3], ids=ids, device="cuda"))


@pytest.mark.parametrize("batch_size", [0, 4])
def test_no_lookups(batch_size: int) -> None:
    call = make_call(
        TABLES["different tables"].tables,
        batch_size=batch_size,
        lengths=[0] * (3 * batch_size),
        device="cuda",
    )
    for core, core_grad in zip(
        call.cores, call.backward(call.grad_output(), deterministic=True), strict=True
    ):
        assert torch.equal(core_grad, torch.zeros_like(core))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pooling_mode", [SUM, MEAN])
def test_repeated_runs_are_bit_identical(dtype: torch.dtype, pooling_mode: int) -> None:
    """Each beside a kernel of another stream, which takes multiprocessors away."""
    call = skewed_call(dtype=dtype, pooling_mode=pooling_mode, weighted=True)
    grad = call.grad_output()
    results = []
    for run in range(RUNS):
        with torch.cuda.stream(torch.cuda.Stream()):
            noise = torch.randn(512 * (run + 1), 2048, device="cuda")
            noise @ noise.t()
        results.append(call.backward(grad, deterministic=True))
    assert are_equal(results)
    for actual, wanted in zip(results[0], expect(call).gradients(grad)[0], strict=True):
        assert_matches(actual, wanted, slack=10)


def test_gradients_of_weights_are_bit_identical() -> None:
    call = skewed_call(weighted=True)
    grad = call.grad_output()
    assert are_equal([[call.weights_grad(grad)] for _ in range(RUNS)])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps(optimizer: str) -> None:
    group = TABLES["features share tables"]
    call = group.call(weighted=True, device="cuda")
    training = Training(call, optimizer, deterministic=True)
    for seed in (1, 2):
        assert_step_matches(training, call.grad_output(seed=seed))


@pytest.mark.parametrize("optimizer", ["exact_adagrad", "exact_row_wise_adagrad", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeated_steps_are_bit_identical(optimizer: str, dtype: torch.dtype) -> None:
    call = skewed_call(dtype=dtype, weighted=True)
    results = []
    for _ in range(3):
        training = Training(call.to("cuda"), optimizer, deterministic=True)
        for seed in range(4):
            training.update(call.grad_output(seed=seed))
        results.append([state for states in training.states() for state in states])
    assert are_equal(results)


def test_graph_gives_the_same_bits() -> None:
    """A replay with other lookups; lengths of bags stay, so that the tensors do."""

    def fixed_call(seed: int) -> Call:
        return make_call(
            SHARED, batch_size=300, lengths=[3] * 1200, weighted=True, seed=seed, device="cuda"
        )

    call = fixed_call(0)
    grad = call.grad_output()
    call.backward(grad, deterministic=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        core_grads = call.backward(grad, deterministic=True)
    for seed in (1, 2):
        other = dataclasses.replace(fixed_call(seed), cores=call.cores)
        call.indices.copy_(other.indices)
        assert call.per_sample_weights is not None and other.per_sample_weights is not None
        call.per_sample_weights.copy_(other.per_sample_weights)
        graph.replay()
        assert are_equal([core_grads, other.backward(grad, deterministic=True)])


def test_host_does_not_wait() -> None:
    call = skewed_call(batch_size=100)
    grad = call.grad_output()
    call.backward(grad, deterministic=True)  # loads the kernels, which may synchronise
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)
        call.backward(grad, deterministic=True)
    assert not stream.query(), "the operator waited for the device"
    stream.synchronize()


def test_function_follows_the_setting(deterministic: None) -> None:
    table = SHARED[0]
    call = make_call([table], batch_size=500, max_length=30, device="cuda")
    leaves = [core.requires_grad_() for core in call.cores]

    def gradients() -> list[Tensor]:
        output = tt_embedding_bag(call.indices, leaves, call.offsets[:-1], mode="sum")
        return list(torch.autograd.grad(output.square().sum(), leaves))

    assert are_equal([gradients() for _ in range(RUNS)])


@pytest.mark.parametrize("optimizer", ["exact_adagrad", "adam"])
def test_module_follows_the_setting(optimizer: str, deterministic: None) -> None:
    spec = TTSpec(11_000, 128, (20, 22, 25), (4, 4, 8), (32, 32))
    generator = torch.Generator().manual_seed(3)
    indices = torch.randint(0, 11_000, (30_000,), generator=generator).cuda()
    indices[::7] = 5
    offsets = torch.arange(0, 30_001, 3, device="cuda")
    results = []
    for _ in range(3):
        torch.manual_seed(0)
        module = TableBatchedFlowTTEmbeddingBags([spec], optimizer=optimizer, device="cuda")
        for _ in range(4):
            module(indices, offsets).square().sum().backward()
        results.append([core.detach() for core in module.tt_cores])
    assert are_equal(results)
