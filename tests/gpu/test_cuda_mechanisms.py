"""The mechanisms of the tiled path can be switched off one by one, and the result stays."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.calls import MEAN, NONE, SUM, Call, Table, make_call
from tests.gpu.expected import assert_matches, expect

WORDS = ["fusion", "grouping", "folding", "sharing", "stealing", "checkpoints"]
TABLE = Table((20, 22, 25), (4, 4, 8), (32, 32), 10_999)


@pytest.fixture(autouse=True)
def _tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWTT_CUDA_FORWARD", "tiled")


def skewed_call(pooling_mode: int = SUM, **arguments: object) -> Call:
    """Half of the lookups share a prefix, a tenth an id."""
    lengths = torch.randint(0, 6, (3000,), generator=torch.Generator().manual_seed(1))
    count = int(lengths.sum())
    ids = torch.randint(0, TABLE.rows, (count,), generator=torch.Generator().manual_seed(2))
    ids[::2] = 100 * 25 + ids[::2] % 25
    ids[::10] = 77
    return make_call(
        [TABLE],
        batch_size=3000,
        lengths=lengths.tolist(),
        ids=ids.tolist(),
        pooling_mode=pooling_mode,
        device="cuda",
        **arguments,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("words", [*WORDS, ",".join(WORDS), "grouping,folding,sharing"])
@pytest.mark.parametrize("pooling_mode", [SUM, MEAN, NONE])
def test_switched_off(words: str, pooling_mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = skewed_call(pooling_mode)
    expected = expect(call).output
    monkeypatch.setenv("FLOWTT_CUDA_DISABLE", words)
    assert_matches(call.forward(), expected)
    assert_matches(call.forward(torch.bfloat16), expected)


def test_read_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    call = skewed_call()
    monkeypatch.setenv("FLOWTT_CUDA_DISABLE", "folding,speed")
    with pytest.raises(RuntimeError, match="FLOWTT_CUDA_DISABLE.*speed"):
        call.forward()
    monkeypatch.setenv("FLOWTT_CUDA_DISABLE", "")
    assert_matches(call.forward(), expect(call).output)


@pytest.mark.parametrize("allow_tf32", [False, True])
@pytest.mark.parametrize("pooling_mode", [SUM, MEAN, NONE])
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.float16], ids=str)
def test_repeated_runs_are_bit_identical(
    allow_tf32: bool, pooling_mode: int, output_dtype: torch.dtype
) -> None:
    """In deterministic mode, with bags of many lookups that share rows."""
    call = skewed_call(pooling_mode)
    runs = [call.forward(output_dtype, allow_tf32, deterministic=True) for _ in range(5)]
    assert all(torch.equal(run, runs[0]) for run in runs[1:])
