"""Checks of pipelines, copies and learning rates; run by test_pipelines.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline.train_pipelines import (
    EvalPipelineSparseDist,
    TrainPipelineBase,
)

from tests.distributed.ranks_end_to_end import Click, samples
from tests.distributed.ranks_training import in_order, whole
from tests.distributed.sharded_models import (
    TABLES,
    Reference,
    Table,
    batch,
    dense_parameters,
    plan_for,
    sharders,
    target,
    unsharded,
)
from tests.distributed.torchrun_launcher import run_on_rank
from torchrec_flowtt.distributed import FlowTTEmbeddingBagCollectionSharder

CPU = torch.device("cpu")


def click() -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    model = Click()
    plan = plan_for(model, TABLES)
    sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders())
    generator = torch.Generator().manual_seed(1)
    sharded.load_state_dict(
        {
            name: torch.randn(value.shape, generator=generator) * 0.5
            for name, value in Click().state_dict().items()
        }
    )
    return sharded, torch.optim.Adagrad(dense_parameters(sharded), lr=0.1)


def weights(model: DistributedModelParallel) -> dict[str, Tensor]:
    found = {key: whole(value) for key, value in model.state_dict().items()}
    return {key: value.clone() for key, value in found.items() if value is not None}


def drain(pipeline) -> list[float]:
    losses, iterator = [], samples(6)
    while True:
        try:
            losses.append(pipeline.progress(iterator).item())
        except StopIteration:
            return losses


def plain_loop() -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = click()
    losses = []
    for sample in samples(6):
        optimizer.zero_grad()
        loss, detached = model(sample)
        loss.backward()
        optimizer.step()
        losses.append(detached.item())
    return losses, weights(model)


def equals_plain_loop(pipeline: Callable, **kwargs: object) -> Callable[[], None]:
    def check() -> None:
        expected, expected_weights = plain_loop()
        model, optimizer = click()
        losses = drain(pipeline(model, optimizer, CPU, **kwargs))
        assert losses == expected, (losses, expected)
        for key, value in weights(model).items():
            torch.testing.assert_close(value, expected_weights[key], rtol=0, atol=0, msg=key)

    return check


def eval_pipeline() -> None:
    model, optimizer = click()
    before = weights(model)
    model.eval()
    with torch.no_grad():
        expected = [model(sample)[1].item() for sample in samples(6)]
        assert drain(EvalPipelineSparseDist(model, optimizer, CPU)) == expected
    for key, value in weights(model).items():
        assert torch.equal(value, before[key]), key


def learning_rates_by_table() -> None:
    """apply_optimizer_in_backward with a learning rate a table."""
    tables: list[Table] = [table for table in TABLES if table.place != "dp"]
    rates = {table.name: 0.02 * (i + 1) for i, table in enumerate(tables)}
    reference, model = Reference(tables), unsharded(tables)
    for name, rate in rates.items():
        _apply_optimizer_in_backward(
            torch.optim.Adagrad,
            model.sparse.embedding_bags[name].parameters(),
            {"lr": rate, "eps": 1e-6},
        )
    sharder = FlowTTEmbeddingBagCollectionSharder()
    sharded = DistributedModelParallel(model, plan=plan_for(model, tables), sharders=[sharder])
    sharded.load_state_dict(reference.state_dict())
    trainer = torch.optim.Adagrad(
        [
            {"params": [value], "lr": rates[key.split(".")[2]]}
            for key, value in reference.parameters.items()
        ],
        eps=1e-6,
    )
    for step in range(4):
        batches = [batch(tables, rank, step) for rank in range(2)]
        trainer.zero_grad()
        (sum(target(reference.output(b), step) for b in batches) / 2).backward()
        trainer.step()
        target(in_order(sharded, batches[dist.get_rank()], reference), step).backward()
    for key, value in weights(sharded).items():
        expected = reference.parameters[key].detach().float()
        torch.testing.assert_close(value, expected, rtol=2e-5, atol=2e-5, msg=key)


if __name__ == "__main__":
    run_on_rank(
        {
            "base": equals_plain_loop(TrainPipelineBase),
            "eval_pipeline": eval_pipeline,
            "learning_rates_by_table": learning_rates_by_table,
        }
    )
