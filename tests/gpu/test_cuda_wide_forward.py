"""The tiled kernels for wide tables and for tables of two and of four cores, against float64.

As in test_cuda_tiled_forward.py, every call takes the tiled kernels however small the batch.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.calls import MEAN, SUM, Table, make_call
from tests.gpu.expected import assert_matches, expect, relative_error

# One for each kernel, exact and padded ones, and sizes that no tile divides.
TABLES = {
    "ranks 64": Table((20, 22, 25), (4, 4, 8), (64, 64), 10_007),
    "ranks 128": Table((20, 22, 25), (4, 4, 4), (128, 128), 10_999),
    "ranks 128, 16 columns": Table((20, 22, 25), (2, 4, 2), (128, 128)),
    "ranks 96": Table((9, 10, 11), (4, 4, 8), (96, 70)),
    "512 columns": Table((9, 10, 11), (8, 8, 8), (100, 33)),
    "q2 8": Table((20, 22, 25), (4, 8, 8), (32, 32)),
    "q3 16": Table((9, 10, 11), (4, 4, 16), (24, 40)),
    "odd q": Table((9, 10, 11), (3, 5, 7), (50, 19)),
    "one column": Table((4, 5, 6), (1, 1, 1), (33, 2)),
    "one row": Table((1, 1, 1), (5, 4, 8), (48, 32)),
    "p larger than the bins": Table((3, 5000, 4), (2, 8, 2), (5, 9)),
    "2 cores": Table((90, 110), (8, 16), (32,), 9_889),
    "2 cores, rank 128": Table((90, 110), (8, 16), (128,)),
    "2 cores, rank 64": Table((90, 110), (16, 32), (50,)),
    "2 cores, odd": Table((9, 1300), (5, 19), (70,)),
    "2 cores, tall": Table((90, 11), (64, 8), (17,)),
    "2 cores, one column": Table((9, 11), (1, 1), (3,)),
    "2 cores, p larger than the bins": Table((5, 9000), (4, 4), (6,)),
    "4 cores": Table((10, 12, 9, 11), (4, 4, 4, 2), (32, 32, 32), 11_001),
    "4 cores, odd": Table((10, 12, 9, 11), (3, 5, 3, 5), (17, 40, 9)),
    "4 cores, ranks 64": Table((5, 6, 7, 8), (4, 4, 2, 8), (64, 64, 64)),
    "4 cores, one column": Table((3, 4, 5, 6), (1, 1, 1, 1), (2, 3, 4)),
}
# Some of each kind, where all of them would take long.
SOME = ["ranks 128", "q2 8", "odd q", "2 cores", "2 cores, odd", "4 cores"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TF32_TOLERANCE = 1e-3

pytestmark = pytest.mark.usefixtures("tiled_path")


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("weighted", "pooling_mode"), [(False, SUM), (True, SUM), (True, MEAN)])
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


@pytest.mark.parametrize("more", [0, 4, 60])
def test_about_as_many_slots_as_lookups(more: int) -> None:
    """8,192 rows of 128 columns are buffered, rounded up to a multiple of the multiprocessors."""
    bags = (8_192 + more) // 4
    table = Table((20, 22, 25), (4, 4, 8), (64, 50))
    call = make_call([table], batch_size=bags, lengths=[4] * bags, device="cuda")
    assert_matches(call.forward(), expect(call).output)


@pytest.mark.parametrize(
    "tables",
    [
        [Table((40, 40, 40), q, (128, 128)) for q in [(4, 4, 8), (4, 4, 4), (4, 2, 4)]],
        [TABLES["4 cores, one column"], TABLES["4 cores"]],
        [Table((40, 40, 40), q, (32, 32)) for q in [(1, 2, 16), (8, 4, 8)]],
    ],
    ids=["ranks 128", "4 cores", "ranks 32"],
)
def test_shapes_that_share_a_launch(tables: list[Table]) -> None:
    call = make_call(tables, batch_size=2000, max_length=12, device="cuda")
    assert_matches(call.forward(), expect(call).output)


@pytest.mark.parametrize("name", TABLES)
def test_bags_of_one_lookup(name: str) -> None:
    call = make_call([TABLES[name]], batch_size=5000, lengths=[1] * 5000, device="cuda")
    assert_matches(call.forward(), expect(call).output)
    assert relative_error(call.forward(), expect(call).output) < 2e-6


@pytest.mark.parametrize("name", TABLES)
def test_tf32(name: str) -> None:
    call = make_call([TABLES[name]], batch_size=700, max_length=3, device="cuda")
    output = call.forward(torch.float32, allow_tf32=True)
    assert relative_error(output, expect(call).output) < TF32_TOLERANCE


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("output_dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_length", [1, 12])
def test_16_bit_outputs(name: str, output_dtype: torch.dtype, max_length: int) -> None:
    call = make_call([TABLES[name]], batch_size=400, max_length=max_length, device="cuda")
    output = call.forward(output_dtype)
    assert output.dtype == output_dtype
    tolerance = {torch.float16: 1e-3, torch.bfloat16: 4e-3}[output_dtype]
    assert relative_error(output, expect(call).output) < tolerance


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("allow_tf32", [False, True])
def test_pooling_of_equal_ids(name: str, allow_tf32: bool) -> None:
    """Rows that many bags share are computed once and summed by the pooling kernel."""
    table = TABLES[name]
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 40, (20_000,), generator=generator) * (table.rows // 40)
    call = make_call([table], batch_size=1000, lengths=[20] * 1000, ids=ids.tolist(), device="cuda")
    output = call.forward(torch.float32, allow_tf32=allow_tf32)
    tolerance = TF32_TOLERANCE if allow_tf32 else 2e-6
    assert relative_error(output, expect(call).output) < tolerance


@pytest.mark.parametrize("name", SOME)
def test_one_prefix_has_most_lookups(name: str) -> None:
    table = TABLES[name]
    last = table.p[-1] * (table.p[2] if len(table.p) == 4 else 1)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, table.rows, (20_000,), generator=generator)
    ids[::2] = 7 * last + ids[::2] % last
    call = make_call(
        [table], batch_size=20_000, lengths=[1] * 20_000, ids=ids.tolist(), device="cuda"
    )
    assert_matches(call.forward(), expect(call).output)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(
    "disabled",
    ["fusion", "grouping", "folding", "sharing", "stealing", "checkpoints", "fusion,sharing"],
)
def test_disabled_mechanisms(monkeypatch: pytest.MonkeyPatch, name: str, disabled: str) -> None:
    monkeypatch.setenv("FLOWTT_CUDA_DISABLE", disabled)
    call = make_call([TABLES[name]], batch_size=700, max_length=5, device="cuda")
    assert_matches(call.forward(), expect(call).output)


def test_tables_of_every_kind_in_one_call() -> None:
    tables = list(TABLES.values())
    features = [*range(len(tables)), 1, 0, 11, 1, 3, 18, 18]
    call = make_call(
        tables, feature_table_map=features, batch_size=40, weighted=True, device="cuda"
    )
    assert_matches(call.forward(), expect(call).output)


def test_ids_above_2_32() -> None:
    for table in [
        Table((4000, 1500, 2000), (4, 8, 4), (3, 4)),
        Table((65_000, 65_500), (4, 4), (3,)),
        Table((400, 300, 200, 250), (2, 2, 2, 2), (3, 4, 2)),
    ]:
        last = table.rows - 1
        ids = [last, 2**31 - 1, 2**31, min(last, 2**32 - 1), last - 3, 2**32 % last, 0, 2**24 + 1]
        call = make_call([table], batch_size=4, lengths=[3, 0, 4, 1], ids=ids, device="cuda")
        assert_matches(call.forward(), expect(call).output)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e4, 1e9])
def test_magnitudes_of_the_cores(name: str, scale: float) -> None:
    """fp16 operands: slices are scaled, each by itself, to where fp16 is precise."""
    call = make_call([TABLES[name]], batch_size=300, device="cuda")
    call.cores[1] *= scale
    call.cores[0][::2] *= 1e-3
    call.cores[-1][1::2] *= 1e3
    call.cores[-1][3] = 0
    assert_matches(call.forward(), expect(call).output)
    assert relative_error(call.forward(), expect(call).output) < 2e-6


@pytest.mark.parametrize("name", SOME)
def test_misaligned_tensors(name: str) -> None:
    call = make_call([TABLES[name]], batch_size=300, weighted=True, device="cuda")
    expected = expect(call).output
    shifted = []
    for core in call.cores:
        storage = core.new_empty(core.numel() + 1)
        shifted.append(storage[1:].view(core.shape).copy_(core))
    call.cores = shifted
    assert_matches(call.forward(), expected)


def test_graph_with_changing_lookups() -> None:
    tables = [TABLES[name] for name in SOME]
    batches = [
        make_call(tables, batch_size=900, lengths=[2] * 900 * len(tables), seed=seed, device="cuda")
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
