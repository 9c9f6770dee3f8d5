"""Lookups in packed cores that were kept: the same bits as of lookups that pack them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cuda_on_cpu.emulated import Device, Order, forward, operators
from tests.cuda_on_cpu.tiled_tables import SOME, TABLES
from tests.gpu.calls import MEAN, NONE, Call, Table, make_call

# Of the general kernel alone.
GENERAL = Table((5, 6, 7), (9, 2, 3), (4, 4))


@pytest.fixture(autouse=True)
def _tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", "tiled")


def tables_of(call: Call) -> tuple[list[Tensor], list[int], list[int]]:
    """What is packed of a call."""
    return call.cores, call.cores_per_table, call.num_embeddings


def look_up(
    call: Call,
    packed: Tensor,
    device: Device | None = None,
    output_dtype: torch.dtype = torch.float32,
    allow_tf32: bool = False,
    deterministic: bool = True,
) -> Tensor:
    """``tt_embedding_bag_packed`` of a call."""
    return operators(device or Device()).tt_embedding_bag_packed(
        call.cores, packed, *call.arguments(), output_dtype, allow_tf32, deterministic
    )


def assert_same_bits(
    call: Call,
    output_dtype: torch.dtype = torch.float32,
    allow_tf32: bool = False,
    deterministic: bool = True,
) -> Tensor:
    """Packs on one device, looks up on another; in deterministic mode, where threads do not matter.

    Returns what was packed.
    """
    packed = operators(Device(2, order=Order.DESCENDING)).pack_tt_cores(
        *tables_of(call), output_dtype, allow_tf32
    )
    options = (Device(order=Order.RANDOM), output_dtype, allow_tf32, deterministic)
    assert torch.equal(look_up(call, packed, *options), forward(call, *options))
    return packed


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("allow_tf32", [False, True], ids=["three products", "one product"])
def test_every_tiling(name: str, allow_tf32: bool) -> None:
    call = make_call([TABLES[name]], batch_size=30, max_length=6, weighted=True, pooling_mode=MEAN)
    assert_same_bits(call, allow_tf32=allow_tf32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_16_bit_cores(dtype: torch.dtype, output_dtype: torch.dtype) -> None:
    call = make_call([TABLES[name] for name in SOME], batch_size=20, dtype=dtype)
    assert_same_bits(call, output_dtype)


def test_shared_tables_of_every_kind() -> None:
    """In several launches, one table with none of its own kernels, and one that nobody looks up."""
    tables = [*TABLES.values(), GENERAL, TABLES["16x4"]]
    general = len(TABLES)
    features = [*range(general), 1, general, 0, 11, 1, general, 3, 14, 14]
    call = make_call(tables, feature_table_map=features, batch_size=5)
    assert_same_bits(call)


def test_more_features_than_a_launch_takes() -> None:
    tables = [Table((3, 4, 2), (4, 4, 4), (2, 3)) for _ in range(25)]
    call = make_call(tables, feature_table_map=[*range(25), 3, 3], batch_size=6, weighted=True)
    assert_same_bits(call)


def test_rows_without_pooling() -> None:
    for name in SOME:
        assert_same_bits(make_call([TABLES[name]], batch_size=50, pooling_mode=NONE))


def test_several_ranges_of_samples() -> None:
    """Of an output of 16 bits, whose sums have room for 4,096 samples."""
    lengths = [1] * 4_200
    call = make_call([TABLES["wide, 512 columns"]], batch_size=len(lengths), lengths=lengths)
    assert_same_bits(call, torch.bfloat16, allow_tf32=True, deterministic=False)


def test_general_kernels_do_not_look_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    call = make_call([TABLES["32x8"]])
    packed = assert_same_bits(call)
    packed.fill_(0xFF)
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", "general")
    assert torch.equal(look_up(call, packed), forward(call))


@pytest.mark.parametrize(
    ("table", "dtype"), [(GENERAL, torch.float32), (TABLES["32x8"], torch.float64)]
)
def test_nothing_to_pack(table: Table, dtype: torch.dtype) -> None:
    assert assert_same_bits(make_call([table], dtype=dtype), dtype).numel() == 0


def test_no_lookups() -> None:
    call = make_call([TABLES["32x8"]], batch_size=3, lengths=[0, 0, 0])
    assert_same_bits(call)


def test_it_is_a_copy_until_packed_again() -> None:
    call = make_call([TABLES[name] for name in SOME])
    packed = assert_same_bits(call)
    before = forward(call, deterministic=True)
    for core in call.cores:
        core.mul_(-1.5)
    assert torch.equal(look_up(call, packed), before)
    assert (
        operators(Device()).repack_tt_cores(packed, *tables_of(call), torch.float32, False) is None
    )
    after = forward(call, deterministic=True)
    assert torch.equal(look_up(call, packed), after) and not torch.equal(before, after)


def test_unsuitable_memory_is_refused() -> None:
    call = make_call([TABLES["32x8"], TABLES["wide 64"]])
    tables = tables_of(call)
    ops = operators(Device())
    packed = ops.pack_tt_cores(*tables, torch.float32, False)
    half = ops.pack_tt_cores(*tables, torch.float32, True)
    size, half_size = packed.numel(), half.numel()
    expected = rf"packed: expected the {size} bytes .* three products \(fp32 accuracy\), got "
    wrong = {
        rf"{expected}{half_size};": half,
        rf"{expected}0; .* the same tables": packed[:0],
        "packed: expected dtype uint8, got float32": packed.view(torch.float32),
        r"packed: expected one contiguous dimension, got shape \[1, \d+\]": packed[None],
        "packed: expected one contiguous dimension": packed.repeat_interleave(2)[::2],
        "packed: expected memory that is aligned to 16 bytes": torch.cat([packed, packed])[1:][
            :size
        ],
    }
    for message, memory in wrong.items():
        with pytest.raises(ValueError, match=message):
            look_up(call, memory)
        with pytest.raises(ValueError, match=message):
            ops.repack_tt_cores(memory, *tables, torch.float32, False)
    one_product = rf"the {half_size} bytes .* one product .*, got {size};"
    with pytest.raises(ValueError, match=one_product):
        look_up(call, packed, allow_tf32=True)
    with pytest.raises(ValueError, match="the tables have 3 cores together, got 6"):
        ops.pack_tt_cores(call.cores, [3], [100], torch.float32, False)
    with pytest.raises(ValueError, match="output_dtype: expected float32, float16 or bfloat16"):
        ops.pack_tt_cores(*tables, torch.float64, False)
