"""The tiled kernels of the forward pass against float64 reconstruction.

Every call here is made with FLOWTT_CUDA_FORWARD=tiled, so that tables whose shapes have a tiling
take the tiled kernels however small the batch.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.calls import MEAN, SUM, Table, make_call, more_rows_than_slots
from tests.gpu.expected import assert_matches, expect, relative_error

# One for each tiling, exact and padded ones, and sizes that no tile divides.
TABLES = {
    "16x4": Table((20, 22, 25), (4, 4, 4), (16, 16), 10_007),
    "32x8": Table((20, 22, 25), (4, 4, 8), (32, 32), 10_999),
    "32x4": Table((5, 3, 40), (4, 4, 4), (32, 32)),
    "16x8": Table((7, 11, 13), (4, 4, 8), (16, 16)),
    "padded ranks": Table((9, 10, 11), (4, 4, 8), (24, 17)),
    "one rank small": Table((9, 10, 11), (4, 4, 4), (8, 32)),
    "padded q": Table((6, 5, 4), (3, 2, 7), (5, 30)),
    "rank 1": Table((4, 5, 6), (1, 2, 3), (1, 1)),
    "one column": Table((4, 5, 6), (1, 1, 1), (3, 2)),
    "one row": Table((1, 1, 1), (4, 4, 8), (32, 32)),
    "p larger than a block": Table((700, 1100, 900), (2, 4, 4), (12, 20)),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TF32_TOLERANCE = 1e-3

pytestmark = pytest.mark.usefixtures("tiled_path")


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling_mode", [SUM, MEAN])
def test_values(name: str, dtype: torch.dtype, weighted: bool, pooling_mode: int) -> None:
    call = make_call(
        [TABLES[name]],
        batch_size=150,
        max_length=6,
        dtype=dtype,
        weighted=weighted,
        pooling_mode=pooling_mode,
        device="cuda",
    )
    assert_matches(call.forward(), expect(call).output)


@pytest.mark.parametrize("name", TABLES)
def test_bags_of_one_lookup(name: str) -> None:
    call = make_call([TABLES[name]], batch_size=5000, lengths=[1] * 5000, device="cuda")
    assert_matches(call.forward(), expect(call).output)
    assert relative_error(call.forward(), expect(call).output) < 2e-6


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tf32(name: str, dtype: torch.dtype) -> None:
    call = make_call([TABLES[name]], batch_size=700, max_length=3, dtype=dtype, device="cuda")
    output = call.forward(torch.float32, allow_tf32=True)
    assert relative_error(output, expect(call).output) < TF32_TOLERANCE


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("output_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("allow_tf32", [False, True])
def test_output_dtypes(dtype: torch.dtype, output_dtype: torch.dtype, allow_tf32: bool) -> None:
    tables = [TABLES["32x8"], TABLES["16x4"], TABLES["padded q"]]
    call = make_call(tables, batch_size=400, max_length=3, dtype=dtype, device="cuda")
    output = call.forward(output_dtype, allow_tf32)
    assert output.dtype == output_dtype
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.float32: 2e-6}[output_dtype]
    if allow_tf32 or (dtype != torch.float32 and output_dtype != torch.float32):
        tolerance = max(tolerance, TF32_TOLERANCE)
    assert relative_error(output, expect(call).output) < tolerance


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("offset_dtype", [torch.int32, torch.int64], ids=str)
def test_index_dtypes(index_dtype: torch.dtype, offset_dtype: torch.dtype) -> None:
    call = make_call(
        [TABLES["32x8"]],
        batch_size=300,
        index_dtype=index_dtype,
        offset_dtype=offset_dtype,
        device="cuda",
    )
    assert_matches(call.forward(), expect(call).output)


def test_tables_of_every_kind_in_one_call() -> None:
    """Tilings, tables for the general kernel, and features that share tables, interleaved."""
    others = [Table((7, 9), (4, 3), (5,)), Table((3, 2, 4, 5), (2, 1, 3, 2), (3, 6, 2))]
    tables = [*TABLES.values(), *others]
    features = [*range(len(tables)), 1, 0, 11, 1, 3]
    call = make_call(
        tables, feature_table_map=features, batch_size=40, weighted=True, device="cuda"
    )
    assert_matches(call.forward(), expect(call).output)


def test_more_features_than_a_launch_takes() -> None:
    tables = [Table((3, 4, 2), (4, 4, 4), (2, 3)) for _ in range(70)]
    call = make_call(
        tables, feature_table_map=[*range(70), 3], batch_size=9, weighted=True, device="cuda"
    )
    assert_matches(call.forward(), expect(call).output)


@pytest.mark.parametrize("lengths", [[0] * 6, [0, 3000, 0, 0, 5000, 0], [0, 0, 0, 0, 0, 9000]])
def test_empty_and_long_bags(lengths: list[int]) -> None:
    call = make_call([TABLES["32x8"]], batch_size=6, lengths=lengths, device="cuda")
    output = call.forward()
    assert_matches(output, expect(call).output, slack=4)
    for row, length in zip(output, lengths, strict=True):
        assert length > 0 or not row.any()


def test_batch_of_zero() -> None:
    call = make_call([TABLES["32x8"]], batch_size=0, device="cuda")
    assert call.forward().shape == (0, 128)


@pytest.mark.parametrize("batch_size", [1, 31, 33, 2047, 2049, 8193, 40_000])
def test_chunk_sizes(batch_size: int) -> None:
    call = make_call([TABLES["32x8"]], batch_size=batch_size, max_length=2, device="cuda")
    assert_matches(call.forward(), expect(call).output)


def test_large_chunks() -> None:
    batch_size = 1 << 18
    table = Table((20, 22, 25), (1, 2, 4), (4, 4))
    call = make_call([table], batch_size=batch_size, lengths=[1] * batch_size, device="cuda")
    assert_matches(call.forward(), expect(call).output)


@pytest.mark.parametrize("shift", [0, 1])
def test_more_lookups_than_a_launch_takes(shift: int) -> None:
    """Over 2^20 lookups the batch is looked up in ranges, and a bag may lie in two of them."""
    batch_size = (1 << 18) + 40
    table = Table((20, 22, 25), (1, 2, 4), (4, 4))
    lengths = [4] * batch_size
    lengths[0] += shift
    call = make_call([table], batch_size=batch_size, lengths=lengths, device="cuda")
    assert_matches(call.forward(), expect(call).output)


def test_sums_of_a_16_bit_output_in_several_ranges() -> None:
    """More than 8 MiB of fp32 sums."""
    call = make_call([TABLES["32x8"]], batch_size=40_000, max_length=3, device="cuda")
    output = call.forward(torch.bfloat16)
    assert relative_error(output, expect(call).output) < 4e-3


def test_one_prefix_has_most_lookups() -> None:
    table = TABLES["32x8"]
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, table.rows, (20_000,), generator=generator)
    ids[::2] = 100 * 25 + ids[::2] % 25
    call = make_call(
        [table], batch_size=20_000, lengths=[1] * 20_000, ids=ids.tolist(), device="cuda"
    )
    assert_matches(call.forward(), expect(call).output)


@pytest.mark.parametrize(("twice", "once"), [(10_800, 0), (2_000, 8_500), (100, 10_800)])
def test_more_rows_than_slots(twice: int, once: int) -> None:
    call = more_rows_than_slots(TABLES["32x8"], twice, once, device="cuda")
    assert_matches(call.forward(), expect(call).output)


def test_equal_ids_and_ids_at_the_ends() -> None:
    table = TABLES["32x8"]
    ids = [table.rows - 1] * 3000 + [0] * 3000 + [table.rows - 1, 0, 1, table.rows - 2]
    lengths = [1] * 3000 + [3] * 1000 + [2, 2]
    call = make_call([table], batch_size=len(lengths), lengths=lengths, ids=ids, device="cuda")
    assert_matches(call.forward(), expect(call).output)


def test_ids_above_2_32() -> None:
    table = Table((4000, 1500, 2000), (4, 2, 4), (3, 4))
    last = table.rows - 1
    ids = [last, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**33 + 12_345, 0, 2**24 + 1]
    call = make_call([table], batch_size=4, lengths=[3, 0, 4, 1], ids=ids, device="cuda")
    assert_matches(call.forward(), expect(call).output)


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e4, 1e9])
def test_magnitudes_of_the_cores(scale: float) -> None:
    """fp16 operands: slices are scaled, each by itself, to where fp16 is precise."""
    call = make_call([TABLES["32x8"]], batch_size=300, device="cuda")
    call.cores[1] *= scale
    call.cores[0][::2] *= 1e-3
    call.cores[2][1::2] *= 1e3
    call.cores[2][3] = 0
    assert_matches(call.forward(), expect(call).output)
    assert relative_error(call.forward(), expect(call).output) < 2e-6


def test_non_finite_cores() -> None:
    call = make_call([TABLES["32x8"]], batch_size=2, lengths=[1, 1], ids=[0, 600], device="cuda")
    call.cores[1][0, 0, 0, 0] = torch.inf
    output = call.forward()
    assert not output[0].isfinite().all() and output[1].isfinite().all()


def test_repeated_calls_are_bit_identical() -> None:
    """Bags of at most two lookups: longer ones are summed in any order."""
    call = make_call([TABLES["32x8"]], batch_size=9000, max_length=2, device="cuda")
    first = call.forward()
    assert all(torch.equal(call.forward(), first) for _ in range(5))


def test_misaligned_tensors() -> None:
    call = make_call([TABLES["32x8"]], batch_size=300, weighted=True, device="cuda")
    expected = expect(call).output
    shifted = []
    for core in call.cores:
        storage = core.new_empty(core.numel() + 1)
        shifted.append(storage[1:].view(core.shape).copy_(core))
    call.cores = shifted
    storage = call.indices.new_empty(call.indices.numel() + 1)
    call.indices = storage[1:].copy_(call.indices)
    assert_matches(call.forward(), expected)


def test_graph_with_changing_lookups() -> None:
    tables = [TABLES["32x8"], TABLES["16x4"], TABLES["padded q"]]
    batches = [
        make_call(tables, batch_size=900, lengths=[2] * 2700, seed=seed, device="cuda")
        for seed in range(4)
    ]
    call = batches[0]
    call.forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call.forward()
    for other in batches[1:]:
        call.indices.copy_(other.indices)
        for core, value in zip(call.cores, other.cores, strict=True):
            core.copy_(value)
        expected = expect(call).output
        graph.replay()
        assert_matches(output, expected)


def test_streams_at_the_same_time() -> None:
    calls = [
        make_call([TABLES["32x8"]], batch_size=20_000, max_length=2, seed=seed, device="cuda")
        for seed in range(4)
    ]
    expected = [expect(call).output for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    outputs = []
    for _ in range(5):
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(call.forward())
    torch.cuda.synchronize()
    for i, output in enumerate(outputs):
        assert_matches(output, expected[i % len(calls)])


def test_general_kernel_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call([TABLES["32x8"]], batch_size=2000, lengths=[1] * 2000, device="cuda")
    tiled = call.forward(allow_tf32=True)
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", "general")
    general = call.forward(allow_tf32=True)
    expected = expect(call).output
    assert relative_error(general, expected) < 1e-6 < relative_error(tiled, expected)
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", "fast")
    with pytest.raises(RuntimeError, match="expected auto, tiled or general, got 'fast'"):
        call.forward()
