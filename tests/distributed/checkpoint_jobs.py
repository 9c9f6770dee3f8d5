"""A small training job with a checkpoint, for the checks that ranks_checkpoint.py runs."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.distributed.sharded_models import Table, batch, shard, target

OPTIMIZERS = {
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1},
    "adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1, "eps": 1e-6},
    "row_wise_adagrad": {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1},
    "adam": {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.05, "weight_decay": 0.01},
}


def tables(*places: str, fbgemm: str = "tw0") -> list[Table]:
    """Three TT tables at the places given, and two of FBGEMM."""
    first, second, third = places
    return [
        Table("tt_a", first, ["a", "b"], rows=60, dim=8),
        Table("tt_b", second, ["c"], rows=40, dim=12),
        Table("tt_c", third, ["d"], rows=40, dim=8, ranks=(2,)),
        Table("fb_tw", fbgemm, ["e"], tt=False),
        Table("fb_dp", "dp", ["f"], tt=False),
    ]


class Job:
    """A model, its optimizers, and the checkpoint of both."""

    def __init__(
        self, model_tables: list[Table], fused_params: dict, dense=None, size: int = 6, **kwargs
    ) -> None:
        self.tables = model_tables
        self.size = size
        self.model = shard(model_tables, fused_params, **kwargs)
        optimizers = [("", self.model.fused_optimizer)]
        parameters = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        if parameters:
            wrapped = KeyedOptimizerWrapper(
                parameters, dense or (lambda params: torch.optim.Adagrad(params, lr=0.05))
            )
            optimizers.append(("", wrapped))
        self.optimizer = CombinedOptimizer(optimizers)

    def train(self, steps: range) -> list[float]:
        """Losses of some steps."""
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            embeddings = self.model.module.sparse(
                batch(self.tables, dist.get_rank(), step, size=self.size)
            )
            # By name: the order of the columns depends on where the tables are.
            parts = [value for _, value in sorted(embeddings.to_dict().items())]
            loss = target(torch.cat(parts, dim=1), step)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def state(self, optimizer: bool = True) -> dict:
        """What is saved."""
        state = {"model": self.model.state_dict()}
        if optimizer:
            state["optimizer"] = self.optimizer.state_dict()
        return state

    def load(self, folder: str, optimizer: bool = True) -> None:
        """Load a checkpoint into this job."""
        state = self.state(optimizer)
        dcp.load(state, checkpoint_id=folder)
        self.model.load_state_dict(state["model"])
        if optimizer:
            self.optimizer.load_state_dict(state["optimizer"])


def weights(job: Job) -> dict[str, Tensor]:
    """All weights, whole, on rank 0."""
    found = {}
    for key, value in job.model.state_dict().items():
        if isinstance(value, DTensor):
            value = value.to_local().local_shards()[0] if value.to_local().local_shards() else None
        elif isinstance(value, ShardedTensor):
            out = torch.empty(value.size()) if dist.get_rank() == 0 else None
            value.gather(0, out)
            value = out
        if value is not None:
            found[key] = value.detach().clone()
    return found


def shared_folder() -> str:
    folder: list = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    return folder[0]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    if dist.get_rank() > 0:
        return  # Sharded weights are gathered on rank 0.
    assert found.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=0, msg=key)
