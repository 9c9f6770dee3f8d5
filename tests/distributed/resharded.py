"""Checks that a run goes on after tables and ranks changed: saved on two ranks, loaded on any.

Each rank has its part of one global batch, so an uninterrupted run has the same weights on any
number of ranks, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.distributed.checkpoint_jobs import Job, weights
from tests.distributed.sharded_models import Table, batch
from torchrec_flowtt.distributed.optimizer_states import saved_in_other_sharding
from torchrec_flowtt.modules import RowWiseAdagrad

_EMBEDDINGS = 64  # of the global batch: Adam needs every slice to be looked up in every step
_LR, _EPS, _DECAY = 0.05, 1e-8, 0.01
# The fused optimizer and its counterpart for data-parallel tables.
_OPTIMIZERS = {
    "adagrad": (
        EmbOptimType.EXACT_ADAGRAD,
        lambda params: torch.optim.Adagrad(params, lr=_LR, eps=_EPS),
    ),
    "row_wise_adagrad": (
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        lambda params: RowWiseAdagrad(params, lr=_LR, eps=_EPS),
    ),
    "adam": (
        EmbOptimType.ADAM,
        lambda params: torch.optim.AdamW(params, lr=_LR, eps=_EPS, weight_decay=_DECAY),
    ),
}
SAVE_CHECKS = [f"save_{name}_for_other_ranks" for name in _OPTIMIZERS]
LOAD_CHECKS = [f"resume_{name}_resharded" for name in _OPTIMIZERS]


class GlobalBatchJob(Job):
    """Trains on this rank's part of one batch, by the mean loss of its examples."""

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            embeddings = self.model.module.sparse(_part(self.tables, step)).to_dict()
            output = torch.cat([value for _, value in sorted(embeddings.items())], dim=1)
            first = dist.get_rank() * output.shape[0]
            wave = torch.arange(output.numel()).reshape(output.shape) + first * output.shape[1]
            loss = (output - torch.sin(wave + step)).square().sum(dim=1).mean()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


def _part(tables: list[Table], step: int) -> KeyedJaggedTensor:
    whole = batch(tables, 0, step, size=_EMBEDDINGS)
    size = _EMBEDDINGS // dist.get_world_size()
    first = dist.get_rank() * size
    lengths, values = [], []
    for jagged in whole.to_dict().values():
        bags = jagged.to_dense()[first : first + size]
        lengths += [bag.numel() for bag in bags]
        values += bags
    return KeyedJaggedTensor(
        keys=whole.keys(), values=torch.cat(values), lengths=torch.tensor(lengths)
    )


def _job(optimizer: str, *places: str, fbgemm: str) -> GlobalBatchJob:
    first, second, third = places
    fused, dense = _OPTIMIZERS[optimizer]
    fused_params = {"optimizer": fused, "learning_rate": _LR, "eps": _EPS}
    if optimizer == "adam":
        fused_params["weight_decay"] = _DECAY
        fbgemm = "dp"  # FBGEMM has no fused Adam on the CPU
    tables = [
        Table("tt_a", first, ["a", "b"], rows=12, dim=8),
        Table("tt_b", second, ["c"], rows=10, dim=12, ranks=(4, 3)),
        Table("tt_c", third, ["d"], rows=6, dim=8, ranks=(2,)),
        Table("fb_tw", fbgemm, ["e"], tt=False, rows=20),
        Table("fb_dp", "dp", ["f"], tt=False, rows=20),
    ]
    return GlobalBatchJob(tables, fused_params, dense=dense)


def _save(optimizer: str, folder: Path) -> None:
    job = _job(optimizer, "tw0", "dp", "tw1", fbgemm="tw1")
    job.train(range(3))
    dcp.save(job.state(), checkpoint_id=folder / optimizer)
    job.train(range(3, 6))
    whole = weights(job)
    if dist.get_rank() == 0:
        torch.save(whole, folder / f"{optimizer}.pt")


def _load(optimizer: str, folder: Path) -> None:
    """tt_a becomes data-parallel, tt_b table-wise, and tt_c moves."""
    torch.manual_seed(99)
    last = {1: "tw0", 2: "tw1", 4: "tw3"}[dist.get_world_size()]
    job = _job(optimizer, "dp", last, "tw0", fbgemm="tw0")
    job.optimizer.init_state()
    state = job.state()
    with saved_in_other_sharding(state["optimizer"], ["tt_a", "tt_b"]):
        dcp.load(state, checkpoint_id=folder / optimizer)
    job.model.load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    job.train(range(3, 6))
    found = weights(job)
    if dist.get_rank() == 0:
        expected = torch.load(folder / f"{optimizer}.pt")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=key)


def save_checks(folder: Path) -> dict[str, Callable[[], None]]:
    """Checks of two ranks, which leave a checkpoint and the weights after three more steps."""
    return {
        name: lambda optimizer=optimizer: _save(optimizer, folder)
        for name, optimizer in zip(SAVE_CHECKS, _OPTIMIZERS, strict=True)
    } | load_checks(folder)


def load_checks(folder: Path) -> dict[str, Callable[[], None]]:
    """Checks of any number of ranks, which load those checkpoints under another plan."""
    return {
        name: lambda optimizer=optimizer: _load(optimizer, folder)
        for name, optimizer in zip(LOAD_CHECKS, _OPTIMIZERS, strict=True)
    }
