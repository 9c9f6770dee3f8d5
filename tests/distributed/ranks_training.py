"""Checks of sharded training against a float64 reference; run by test_sharded_training.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.sharded_models import (
    ADAGRAD,
    Reference,
    Table,
    batch,
    dense_parameters,
    features_of,
    shard,
    target,
    tt_and_fbgemm_tables,
    variable_batch,
)
from tests.distributed.torchrun_launcher import run_on_rank

STEPS = 5


def whole(value: Tensor) -> Tensor | None:
    """The whole tensor on rank 0, whatever a state dict holds; None elsewhere if sharded."""
    if not isinstance(value, ShardedTensor):
        return value.detach()
    out = torch.empty(value.size(), dtype=value.dtype) if dist.get_rank() == 0 else None
    value.gather(0, out)
    return out


def in_order(model, features, reference: Reference) -> Tensor:
    """The model's output, its parts in the reference's order."""
    pooled = model.module.sparse(features)
    parts = dict(zip(pooled.keys(), pooled.values().split(pooled.length_per_key(), 1), strict=True))
    return torch.cat([parts[name] for name in reference.names()], dim=1)


def compare_state(model, reference: Reference, tolerance: float) -> None:
    for key, value in model.state_dict().items():
        found = whole(value)
        if found is not None and key in reference.parameters:
            torch.testing.assert_close(
                found.double(),
                reference.parameters[key].detach(),
                rtol=tolerance,
                atol=tolerance,
                msg=lambda text, key=key: f"{key}: {text}",
            )


def compare_training(
    tables: list[Table], *, weighted: bool = False, sizes=(6, 6), steps: int = STEPS
) -> None:
    """Outputs, and weights after some Adagrad steps, equal the reference's."""
    reference = Reference(tables)
    model = shard(tables, ADAGRAD, weighted=weighted)
    expected_keys = set(reference.parameters)
    assert set(model.state_dict()) == expected_keys, set(model.state_dict()) ^ expected_keys
    result = model.load_state_dict(reference.state_dict())
    assert not result.unexpected_keys, result
    assert not result.missing_keys, result
    compare_state(model, reference, 1e-7)

    parameters = dense_parameters(model)
    dense = torch.optim.Adagrad(parameters, lr=0.05, eps=1e-6) if parameters else None
    trainer = torch.optim.Adagrad(reference.parameters.values(), lr=0.05, eps=1e-6)
    rank = dist.get_rank()
    for step in range(steps):
        batches = [
            batch(tables, r, step, size=size, weighted=weighted) for r, size in enumerate(sizes)
        ]
        trainer.zero_grad()
        outputs = [reference.output(b) for b in batches]
        (sum(target(output, step) for output in outputs) / len(outputs)).backward()

        output = in_order(model, batches[rank], reference)
        torch.testing.assert_close(
            output.double(),
            outputs[rank].detach(),
            rtol=1e-5,
            atol=1e-5,
            msg=lambda text, step=step: f"output of step {step}: {text}",
        )
        if dense is not None:
            dense.zero_grad()
        target(output, step).backward()
        if step == 0:
            compare_dense_gradients(model, reference)
        if dense is not None:
            dense.step()
        trainer.step()
    compare_state(model, reference, 2e-5)


def compare_dense_gradients(model, reference: Reference) -> None:
    named = dict(model.named_parameters())
    for key in reference.parameters:
        if ".tt_cores." not in key or named[key].grad is None:
            continue
        torch.testing.assert_close(
            named[key].grad.double(),
            reference.parameters[key].grad,
            rtol=1e-4,
            atol=1e-5,
            msg=lambda text, key=key: f"gradient of {key}: {text}",
        )


def tt_beside_fbgemm() -> None:
    compare_training(tt_and_fbgemm_tables())


def tt_beside_fbgemm_mean() -> None:
    compare_training(tt_and_fbgemm_tables(mean=True))


def weighted() -> None:
    tables = [
        Table("tt_a", "tw0", ["a", "b"]),
        Table("tt_b", "tw1", ["c"], mean=True),
        Table("tt_c", "dp", ["d"]),
        Table("fb_tw", "tw1", ["e"], tt=False),
    ]
    compare_training(tables, weighted=True)


def ranks_differ_in_weights_dtype() -> None:
    tables = [table for table in tt_and_fbgemm_tables() if table.name != "fb_rw"]
    reference = Reference(tables)
    model = shard(tables, weighted=True)
    model.load_state_dict(reference.state_dict())
    rank = dist.get_rank()
    dtypes = [torch.float64, torch.float16, torch.float32, torch.bfloat16]
    for step in range(len(dtypes)):
        features = batch(tables, rank, step, weighted=True)
        # Multiples of 1/8, which every dtype has.
        weights = (features.weights() * 8).round() / 8
        exact, converted = (
            KeyedJaggedTensor(
                features.keys(), features.values(), weights.to(dtype), features.lengths()
            )
            for dtype in (torch.float64, dtypes[step - rank])
        )
        torch.testing.assert_close(
            in_order(model, converted, reference).double(),
            reference.output(exact).detach(),
            rtol=1e-5,
            atol=1e-5,
        )


def only_tt() -> None:
    compare_training([Table("tt_a", "tw1", ["a"]), Table("tt_b", "dp", ["b"])])


def ranks_differ_in_batch_size() -> None:
    tables = [Table("tt_a", "tw0", ["a"]), Table("tt_b", "dp", ["b"]), Table("tt_c", "tw1", ["c"])]
    compare_training(tables, sizes=(7, 3))


def rank_without_examples() -> None:
    tables = [Table("tt_a", "tw0", ["a"]), Table("tt_b", "dp", ["b"]), Table("tt_c", "tw1", ["c"])]
    compare_training(tables, sizes=(5, 0))


def batches_without_lookups() -> None:
    tables = tt_and_fbgemm_tables()
    reference = Reference(tables)
    model = shard(tables, ADAGRAD)
    model.load_state_dict(reference.state_dict())
    dense = torch.optim.Adagrad(dense_parameters(model), lr=0.05)
    names = features_of(tables)
    zeros = torch.zeros(4 * len(names), dtype=torch.int64)
    for size, bags in (
        (4, {"lengths": zeros}),
        (4, {"offsets": torch.cat([zeros, zeros[:1]])}),
        (0, {"lengths": zeros[:0], "stride": 0}),
        (0, {"lengths": zeros[:0]}),
        (0, {"offsets": zeros[:1]}),
    ):
        features = KeyedJaggedTensor(keys=names, values=torch.empty(0, dtype=torch.int64), **bags)
        output = in_order(model, features, reference)
        assert output.shape == (size, sum(t.dim * len(t.features) for t in tables))
        assert not output.any()
        dense.zero_grad()
        (output - 1).pow(2).sum().backward()
        dense.step()
    compare_state(model, reference, 1e-7)


def kept_packed_cores() -> None:
    """Copies follow the steps, table-wise and data-parallel."""
    tables = tt_and_fbgemm_tables()
    reference = Reference(tables)
    model = shard(tables, ADAGRAD)
    model.load_state_dict(reference.state_dict())
    collection = model.module.sparse
    collection.keep_packed_cores()
    packed = [kernel.emb_module._packed_cores for kernel in collection._tt_kernels()]
    dense = torch.optim.Adagrad(dense_parameters(model), lr=0.05)
    for step in range(3):
        features = batch(tables, dist.get_rank(), step)
        with torch.no_grad():
            kept = in_order(model, features, reference)
        assert packed and all(copies._packing is not None for copies in packed)
        output = in_order(model, features, reference)
        assert torch.equal(kept, output)
        dense.zero_grad()
        target(output, step).backward()
        dense.step()
        collection.refresh_packed_cores()
    collection.keep_packed_cores(False)
    assert not any(kernel.emb_module._packed_cores for kernel in collection._tt_kernels())


def half_precision_communication() -> None:
    tables = [Table("tt_a", "tw0", ["a"]), Table("tt_b", "tw1", ["b"])]
    reference = Reference(tables)
    codecs = get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16)
    )
    model = shard(tables, ADAGRAD, qcomm_codecs_registry=codecs)
    model.load_state_dict(reference.state_dict())
    features = batch(tables, dist.get_rank(), 0)
    output = in_order(model, features, reference)
    expected = reference.output(features).detach()
    torch.testing.assert_close(output.double(), expected, rtol=2e-3, atol=2e-3)
    assert torch.equal(output, output.half().float())
    output.sum().backward()


def row_wise_mean_beside_tt_sum() -> None:
    # Alone, TorchRec would divide the TT tables' sums by the bag lengths too.
    tables = [
        Table("tt_a", "tw0", ["a"]),
        Table("tt_b", "tw1", ["b"], mean=True),
        Table("fb_rw", "rw", ["c"], tt=False, mean=True),
    ]
    compare_training(tables)


def compare_variable_batches(tables: list[Table]) -> None:
    reference = Reference(tables)
    # FBGEMM has no Adagrad for variable batches.
    model = shard(tables, {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.05})
    model.load_state_dict(reference.state_dict())
    parameters = dense_parameters(model)
    dense = torch.optim.SGD(parameters, lr=0.05) if parameters else None
    trainer = torch.optim.SGD(reference.parameters.values(), lr=0.05)
    rank = dist.get_rank()
    for step in range(3):
        batches = [variable_batch(tables, r, step) for r in range(2)]
        trainer.zero_grad()
        outputs = [reference.output(everything) for _, everything in batches]
        (sum(target(output, step) for output in outputs) / 2).backward()
        trainer.step()
        output = in_order(model, batches[rank][0], reference)
        torch.testing.assert_close(output.double(), outputs[rank].detach(), rtol=1e-5, atol=1e-5)
        if dense is not None:
            dense.zero_grad()
        target(output, step).backward()
        if dense is not None:
            dense.step()
    compare_state(model, reference, 2e-5)


def variable_batch_table_wise() -> None:
    compare_variable_batches(
        [
            Table("tt_a", "tw0", ["a", "b"]),
            Table("tt_b", "tw1", ["c"], mean=True),
            Table("fb_tw", "tw0", ["d"], tt=False),
            Table("tt_c", "tw0", ["e"], mean=True),
        ]
    )


def variable_batch_data_parallel() -> None:
    compare_variable_batches(
        [
            Table("tt_a", "tw0", ["a"]),
            Table("tt_b", "dp", ["b", "c"]),
            Table("tt_c", "dp", ["d"], mean=True),
        ]
    )


if __name__ == "__main__":
    run_on_rank(
        {
            "tt_beside_fbgemm": tt_beside_fbgemm,
            "tt_beside_fbgemm_mean": tt_beside_fbgemm_mean,
            "weighted": weighted,
            "ranks_differ_in_weights_dtype": ranks_differ_in_weights_dtype,
            "only_tt": only_tt,
            "ranks_differ_in_batch_size": ranks_differ_in_batch_size,
            "rank_without_examples": rank_without_examples,
            "batches_without_lookups": batches_without_lookups,
            "kept_packed_cores": kept_packed_cores,
            "half_precision_communication": half_precision_communication,
            "row_wise_mean_beside_tt_sum": row_wise_mean_beside_tt_sum,
            "variable_batch_table_wise": variable_batch_table_wise,
            "variable_batch_data_parallel": variable_batch_data_parallel,
        }
    )
