"""Lookups in packed cores that were kept: bits, memory, streams, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tests.gpu.calls import MEAN, Call, Table, make_call
from tests.gpu.expected import assert_matches, expect
from torchrec_flowtt.functional import PackedCores, tt_embedding

ops = torch.ops.flowtt
TABLES = {
    "16x4": Table((20, 22, 25), (4, 4, 4), (16, 16), 10_007),
    "32x8": Table((20, 22, 25), (4, 4, 8), (32, 32), 10_999),
    "padded": Table((6, 5, 4), (3, 2, 7), (5, 30)),
    "wide 64": Table((20, 22, 25), (4, 4, 8), (64, 50)),
    "wide 128": Table((9, 10, 11), (2, 4, 4), (128, 100)),
    "2 cores": Table((90, 110), (8, 16), (32,), 9_889),
    "4 cores": Table((10, 12, 9, 11), (4, 4, 4, 2), (32, 32, 32), 11_001),
    "general": Table((5, 6, 7), (9, 2, 3), (4, 4)),
}

pytestmark = pytest.mark.usefixtures("tiled_path")


def pack(
    call: Call, output_dtype: torch.dtype = torch.float32, allow_tf32: bool = False
) -> tuple[Tensor, tuple[Any, ...]]:
    """Packed cores, and the operator's arguments."""
    tables = (call.cores, call.cores_per_table, call.num_embeddings, output_dtype, allow_tf32)
    return ops.pack_tt_cores(*tables), tables


def look_up(
    call: Call,
    packed: Tensor,
    output_dtype: torch.dtype = torch.float32,
    allow_tf32: bool = False,
    deterministic: bool = True,
) -> Tensor:
    """In deterministic mode, as otherwise no two lookups have the same bits."""
    output: Tensor = ops.tt_embedding_bag_packed(
        call.cores, packed, *call.arguments(), output_dtype, allow_tf32, deterministic
    )
    return output


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("allow_tf32", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits(name: str, allow_tf32: bool, dtype: torch.dtype) -> None:
    call = make_call(
        [TABLES[name]],
        batch_size=300,
        max_length=6,
        weighted=True,
        pooling_mode=MEAN,
        dtype=dtype,
        device="cuda",
    )
    packed, _ = pack(call, allow_tf32=allow_tf32)
    output = look_up(call, packed, allow_tf32=allow_tf32)
    assert torch.equal(output, call.forward(torch.float32, allow_tf32, deterministic=True))
    if not allow_tf32:
        assert_matches(look_up(call, packed, deterministic=False), expect(call).output)


def test_shared_tables_in_several_launches() -> None:
    features = [*range(len(TABLES)), 1, 1, 7, 0, 6, 6, 3]
    call = make_call(
        list(TABLES.values()), feature_table_map=features, batch_size=50, device="cuda"
    )
    packed, tables = pack(call)
    assert torch.equal(look_up(call, packed), call.forward(deterministic=True))
    for core in call.cores:
        core.mul_(-1.5)
    ops.repack_tt_cores(packed, *tables)
    assert torch.equal(look_up(call, packed), call.forward(deterministic=True))


def test_packing_waits_for_lookups_and_lookups_for_packing() -> None:
    """All are queued at once, in the same memory."""
    table = TABLES["wide 64"]
    call = make_call([table], batch_size=60_000, lengths=[1] * 60_000, device="cuda")
    packed, tables = pack(call)
    outputs = []
    for _ in range(8):
        outputs.append(look_up(call, packed, deterministic=False))
        call.cores[1].mul_(-1)
        ops.repack_tt_cores(packed, *tables)
    for output in outputs:
        torch.testing.assert_close(output, call.forward(), rtol=1e-5, atol=1e-5)
        call.cores[1].mul_(-1)


def test_a_lookup_takes_less_memory() -> None:
    call = make_call([TABLES["wide 128"]], batch_size=100, device="cuda")
    packed, _ = pack(call)

    def peak(lookup: Callable[[], Tensor]) -> int:
        lookup()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        lookup()
        return torch.cuda.max_memory_allocated() - before

    saved = peak(call.forward) - peak(lambda: look_up(call, packed, deterministic=False))
    rounding = 1 << 20  # of what the allocator gives
    assert abs(saved - packed.numel()) <= rounding < packed.numel() // 2


def test_tables_beyond_32_bits_are_packed_by_their_lookups() -> None:
    """Kernels can address those of 20 such tables."""
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of free memory")
    tables = 21
    call = make_call(
        [Table((4, 800, 4), (8, 8, 2), (128, 128))],
        feature_table_map=[0] * tables,
        batch_size=10,
        device="cuda",
    )
    call.cores *= tables
    call.cores_per_table *= tables
    call.num_embeddings *= tables
    call.feature_table_map = [*range(tables)]
    packed, _ = pack(call, allow_tf32=True)
    assert 4.0e9 < packed.numel() < 2**32
    expected = call.forward(allow_tf32=True, deterministic=True)
    assert torch.equal(look_up(call, packed, allow_tf32=True), expected)


def test_unsuitable_memory_is_refused() -> None:
    call = make_call([TABLES["32x8"]], device="cuda")
    packed, tables = pack(call)
    with pytest.raises(ValueError, match="packed: expected the device of the cores"):
        look_up(call, packed.cpu())
    with pytest.raises(ValueError, match=r"packed: expected the \d+ bytes .* one product"):
        look_up(call, packed, allow_tf32=True)
    with pytest.raises(ValueError, match="aligned to 16 bytes"):
        ops.repack_tt_cores(torch.cat([packed, packed])[1 : packed.numel() + 1], *tables)


def test_opcheck() -> None:
    call = make_call([TABLES["32x8"], TABLES["4 cores"]], weighted=True, device="cuda")
    packed, tables = pack(call)
    # What lies between the tables' cores is not written, so that no two packings are the same.
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(ops.pack_tt_cores.default, tables, test_utils=utilities)
    opcheck(ops.repack_tt_cores.default, (packed, *tables), test_utils=utilities)
    arguments = (call.cores, packed, *call.arguments(), torch.float32, False, True)
    opcheck(ops.tt_embedding_bag_packed.default, arguments)


def test_lookups_on_other_streams_wait_for_the_packing() -> None:
    generator = torch.Generator().manual_seed(0)
    cores = [core.cuda() for core in TABLES["32x8"].cores(torch.float32, generator)]
    indices = torch.randint(0, 10_999, (2000,), generator=generator).cuda()
    packed = PackedCores()
    with torch.no_grad():
        tt_embedding(indices, cores, packed=packed)
        side = torch.cuda.Stream()
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)
        cores[1].mul_(3)
        tt_embedding(indices, cores, packed=packed)
        with torch.cuda.stream(side):
            output = tt_embedding(indices, cores, packed=packed)
        assert not side.query(), "the lookup did not wait, or the host did"
        torch.cuda.synchronize()
        torch.testing.assert_close(output, tt_embedding(indices, cores), rtol=1e-5, atol=1e-5)
