from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.reference import dense_table
from torchrec_flowtt.functional import (
    FusedUpdate,
    PoolingMode,
    rows,
    table_batched_tt_embedding_bag,
    tt_embedding,
)


def make_cores(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 1, 2, 4), (4, 4, 3, 5), (5, 5, 2, 1)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


@pytest.mark.parametrize("shape", [(), (7,), (2, 3), (2, 0, 3), (2, 1, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_calls_as_embedding(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    cores = [core.requires_grad_() for core in make_cores()]
    indices = torch.randint(0, 60, shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    output = tt_embedding(indices, cores)
    expected = functional.embedding(indices, dense_table(cores))
    assert output.shape == (*shape, 12)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(output, rows(cores, indices.long()))
    grad = torch.randn_like(output)
    ours = torch.autograd.grad(output, cores, grad)
    theirs = torch.autograd.grad(expected, cores, grad)
    torch.testing.assert_close(ours, theirs)


def test_views_and_dtypes() -> None:
    cores = make_cores(torch.bfloat16)
    indices = torch.arange(60).reshape(6, 10).t()[::2]
    output = tt_embedding(indices, cores, output_dtype=torch.float32)
    assert output.dtype == torch.float32
    expected = dense_table(cores)[indices]
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    assert tt_embedding(indices, cores).dtype == torch.bfloat16


def test_compiles() -> None:
    cores = make_cores()
    compiled = torch.compile(tt_embedding, backend="aot_eager", fullgraph=True)
    indices = torch.tensor([[3, 59], [0, 3]])
    torch.testing.assert_close(compiled(indices, cores), tt_embedding(indices, cores))


def test_errors() -> None:
    cores = make_cores()
    with pytest.raises(IndexError, match="expected 0 to 58"):
        tt_embedding(torch.tensor([59]), cores, num_embeddings=59)
    with pytest.raises(ValueError, match="num_embeddings must be 1 to 60.* got 61"):
        tt_embedding(torch.tensor([0]), cores, num_embeddings=61)
    for wrong in (59.0, "59", True, [59]):
        with pytest.raises(TypeError, match="num_embeddings must be an integer, got "):
            tt_embedding(torch.tensor([0]), cores, num_embeddings=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="indices must be int32 or int64, got torch.float32"):
        tt_embedding(torch.tensor([0.0]), cores)
    with pytest.raises(TypeError, match="output_dtype must be one of torch.float64"):
        tt_embedding(torch.tensor([0]), cores, output_dtype=torch.float16)


def test_batched_rows_and_fused_step() -> None:
    """Features of two tables, one of them shared; the step is on the sum over its features."""
    first = make_cores()
    second = [torch.randn(7, 1, 4, 2).double(), torch.randn(3, 2, 3, 1).double()]
    indices = torch.tensor([5, 59, 20, 0, 5])
    offsets = torch.tensor([0, 1, 2, 3, 3, 4, 5])  # features of 2, 1 and 2 lookups

    def look_up(update: FusedUpdate | None, weights: torch.Tensor | None = None) -> torch.Tensor:
        return table_batched_tt_embedding_bag(
            indices,
            offsets,
            [first, second],
            num_embeddings=[60, 21],
            feature_table_map=[0, 1, 0],
            pooling_mode=PoolingMode.NONE,
            per_sample_weights=weights,
            update=update,
        )

    expected = torch.cat(
        [dense_table(first)[[5, 59]], dense_table(second)[[20]], dense_table(first)[[0, 5]]]
    )
    torch.testing.assert_close(look_up(None), expected)
    with pytest.raises(ValueError, match="per_sample_weights must be None without pooling"):
        look_up(None, torch.ones(5))

    cores = [core.requires_grad_() for core in (*first, *second)]
    grad = torch.randn_like(expected)
    dense = torch.autograd.grad(look_up(None), cores, grad)
    before = [core.detach().clone() for core in cores]
    update = FusedUpdate(
        "exact_sgd", torch.tensor(0.5, dtype=torch.float32), torch.tensor(0, dtype=torch.int64)
    )
    look_up(update).backward(grad)
    for core, old, core_grad in zip(cores, before, dense, strict=True):
        torch.testing.assert_close(core.detach(), old - 0.5 * core_grad)
