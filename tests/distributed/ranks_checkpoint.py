"""Checks of checkpoints with torch.distributed.checkpoint; run by test_checkpoint.py.

With ``--load FOLDER`` the script loads, on however many ranks, what two ranks saved before.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.distributed.sharded_models import Table, batch, dense_parameters, shard, target
from tests.distributed.torchrun_launcher import run_on_rank
from torchrec_flowtt.distributed.optimizer_states import saved_in_other_sharding

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


def resume(optimizer: str, before: tuple[str, ...], after: tuple[str, ...]) -> None:
    """A run resumed in a new model has the losses and weights of one that never stopped."""
    # FBGEMM has no fused Adam on the CPU.
    fbgemm = "dp" if optimizer == "adam" else "tw0"
    job = Job(tables(*before, fbgemm=fbgemm), OPTIMIZERS[optimizer])
    job.train(range(3))
    folder = shared_folder()
    dcp.save(job.state(), checkpoint_id=folder)
    expected_losses = job.train(range(3, 6))

    torch.manual_seed(99)
    resumed = Job(tables(*after, fbgemm=fbgemm), OPTIMIZERS[optimizer])
    resumed.load(folder)
    losses = resumed.train(range(3, 6))
    assert losses == expected_losses, (losses, expected_losses)
    assert_same(weights(resumed), weights(job))


def resume_same_plan(optimizer: str):
    return lambda: resume(optimizer, ("tw0", "tw1", "dp"), ("tw0", "tw1", "dp"))


def resume_on_other_ranks() -> None:
    resume("adagrad", ("tw0", "tw1", "dp"), ("tw1", "tw0", "dp"))


def resume_adam_on_one_rank_of_two() -> None:
    resume("adam", ("tw0", "tw1", "tw0"), ("tw1", "tw1", "tw1"))


def weights_between_table_wise_and_data_parallel() -> None:
    job = Job(tables("tw0", "tw1", "dp"), OPTIMIZERS["adagrad"])
    job.train(range(2))
    folder = shared_folder()
    dcp.save(job.state(optimizer=False), checkpoint_id=folder)
    for places in (("dp", "dp", "tw1"), ("tw1", "dp", "tw0")):
        torch.manual_seed(99)
        other = Job(tables(*places), OPTIMIZERS["adagrad"])
        other.load(folder, optimizer=False)
        assert_same(weights(other), weights(job))
        value = batch(job.tables, dist.get_rank(), 0)
        found = other.model.module.sparse(value).to_dict()
        expected = job.model.module.sparse(value).to_dict()
        for name, embedding in expected.items():
            torch.testing.assert_close(found[name], embedding, rtol=1e-6, atol=1e-6)


def optimizer_state_between_shardings(optimizer: str):
    """Training goes on with the same weights after tables change how they are sharded."""
    torch_optimizer = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.AdamW,
    }[optimizer]
    # Adagrad and Adam treat an element without gradient alike only if every slice is looked up,
    # so batches are large and tables small.
    settings = {"lr": 0.05}
    if optimizer != "sgd":
        settings["eps"] = 1e-8
    if optimizer == "adam":
        settings["weight_decay"] = 0.0
    fused = {"optimizer": OPTIMIZERS[optimizer]["optimizer"], "learning_rate": 0.05, "eps": 1e-8}

    def job(place: str) -> Job:
        only = [Table("tt_a", place, ["a"], rows=6, ranks=(2,)), Table("tt_b", "dp", ["b"])]
        return Job(only, fused, dense=lambda p: torch_optimizer(p, **settings), size=64)

    def check() -> None:
        for before, after in (("tw1", "dp"), ("dp", "tw0")):
            first = job(before)
            first.train(range(3))
            folder = shared_folder()
            # Data-parallel SGD has no state at all, and torch cannot load an empty dictionary.
            stateful = optimizer != "sgd"
            dcp.save(first.state(stateful), checkpoint_id=folder)
            first.train(range(3, 6))
            torch.manual_seed(99)
            second = job(after)
            second.optimizer.init_state()
            state = second.state()
            with saved_in_other_sharding(state["optimizer"], ["tt_a"]):
                if not stateful:
                    assert not state.pop("optimizer")["state"]
                dcp.load(state, checkpoint_id=folder)
            second.model.load_state_dict(state["model"])
            if stateful:
                second.optimizer.load_state_dict(state["optimizer"])
            second.train(range(3, 6))
            if dist.get_rank() == 0:
                expected, found = weights(first), weights(second)
                for key, value in expected.items():
                    torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=key)
            else:
                weights(first), weights(second)

    return check


def uncompressed_tables_keep_their_sharding() -> None:
    """Whatever they are sharded as, and whether TT tables are named beside them."""
    job = Job(tables("tw0", "tw1", "dp"), OPTIMIZERS["adagrad"])
    job.train(range(1))
    state = job.state()["optimizer"]
    before = {key: dict(entry) for key, entry in state["state"].items()}
    for names in (["fb_tw"], ["fb_dp"], ["tt_a", "fb_dp", "fb_tw"]):
        # A rank lists the fused state of its own uncompressed tables only.
        listed = [n for n in names if f"sparse.embedding_bags.{n}.weight" in before]
        error = ValueError if any(n.startswith("fb") for n in listed) else KeyError
        with pytest.raises(error, match="fb_"), saved_in_other_sharding(state, names):
            pass
        assert set(state["state"]) == set(before)
        assert all(set(state["state"][key]) == set(before[key]) for key in before)


def state_keys() -> None:
    job = Job(tables("tw0", "tw1", "dp", fbgemm="dp"), OPTIMIZERS["adam"])
    job.train(range(2))
    prefix = "sparse.embedding_bags."
    keys = {f"{prefix}{t}.tt_cores.{k}" for t in ("tt_a", "tt_b") for k in range(3)}
    keys |= {f"{prefix}tt_c.tt_cores.{k}" for k in range(2)}
    keys |= {f"{prefix}{t}.weight" for t in ("fb_tw", "fb_dp")}
    assert set(job.model.state_dict()) == keys
    assert {name for name, _ in job.model.named_parameters()} == keys
    fused = job.model.fused_optimizer.state_dict()["state"]
    table = ("tt_a", "tt_b")[dist.get_rank()]
    for k in range(3):
        state = fused[f"{prefix}{table}.tt_cores.{k}"]
        assert set(state) == {f"{table}.{s}" for s in ("momentum1", "momentum2", "iter")}
        assert state[f"{table}.iter"].local_shards()[0].tensor.tolist() == [2]
    assert f"{prefix}tt_c.tt_cores.0" not in fused
    keys_by_rank: list = [None] * dist.get_world_size()
    dist.all_gather_object(keys_by_rank, set(fused))
    assert keys_by_rank[0] == keys_by_rank[1]
    dense = {key for key, _ in in_backward_optimizer_filter(job.model.named_parameters())}
    assert dense == {key for key in keys if ".tt_c." in key or "fb" in key}
    assert len(dense_parameters(job.model)) == len(dense)


def learning_rate() -> None:
    job = Job(tables("tw0", "tw1", "dp"), OPTIMIZERS["sgd"])
    before = weights(job)
    for group in job.optimizer.param_groups:
        group["lr"] = 0.0
    job.train(range(2))
    assert_same(weights(job), before)
    for group in job.model.fused_optimizer.param_groups:
        group["lr"] = 0.1
    job.train(range(1))
    after = weights(job)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    if dist.get_rank() == 0:
        assert {key.split(".")[2] for key in changed} == {"tt_a", "tt_b", "fb_tw"}, changed


def dtensor_state() -> None:
    def env() -> ShardingEnv:
        group = dist.GroupMember.WORLD
        return ShardingEnv(dist.get_world_size(), dist.get_rank(), group, output_dtensor=True)

    job = Job(tables("tw0", "tw1", "dp"), OPTIMIZERS["adagrad"], env=env())
    key = "sparse.embedding_bags.tt_a.tt_cores.0"
    assert isinstance(job.model.state_dict()[key], DTensor)
    assert job.model.state_dict()[key].shape == job.tables[0].config().tt_spec.core_shapes[0]
    job.train(range(3))
    folder = shared_folder()
    dcp.save(job.state(), checkpoint_id=folder)
    expected = job.train(range(3, 5))
    torch.manual_seed(99)
    resumed = Job(tables("tw0", "tw1", "dp"), OPTIMIZERS["adagrad"], env=env())
    resumed.load(folder)
    assert resumed.train(range(3, 5)) == expected


def rank_without_tables(optimizer: str):
    """One table on two ranks, no dense parameters: a rank has nothing of its own to save."""

    def check() -> None:
        only = [Table("tt_a", "tw0", ["a"])]
        job = Job(only, OPTIMIZERS[optimizer])
        job.train(range(2))
        folder = shared_folder()
        dcp.save(job.state(), checkpoint_id=folder)
        expected = job.train(range(2, 4))
        torch.manual_seed(99)
        resumed = Job(only, OPTIMIZERS[optimizer])
        resumed.load(folder)
        assert resumed.train(range(2, 4)) == expected

    return check


def save_for_other_world_sizes() -> None:
    folder = sys.argv[1]
    job = Job(tables("tw0", "tw1", "dp"), OPTIMIZERS["adagrad"])
    job.train(range(3))
    dcp.save(job.state(), checkpoint_id=folder)
    whole = weights(job)
    if dist.get_rank() == 0:
        torch.save(whole, Path(folder) / "weights.pt")


def load_on_this_world_size() -> None:
    folder = sys.argv[2]
    torch.manual_seed(99)
    job = Job(tables("tw0", "tw0", "dp"), OPTIMIZERS["adagrad"])
    job.load(folder)
    if dist.get_rank() == 0:
        assert_same(weights(job), torch.load(Path(folder) / "weights.pt"))
        state = job.model.fused_optimizer.state_dict()["state"]
        sums = state["sparse.embedding_bags.tt_b.tt_cores.0"]["tt_b.momentum1"]
        assert sums.local_shards()[0].tensor.abs().sum() > 0
    job.train(range(3, 4))


if __name__ == "__main__":
    if sys.argv[1] == "--load":
        run_on_rank({"load_on_this_world_size": load_on_this_world_size})
    else:
        run_on_rank(
            {
                "save_for_other_world_sizes": save_for_other_world_sizes,
                "state_keys": state_keys,
                "uncompressed_tables_keep_their_sharding": uncompressed_tables_keep_their_sharding,
                "learning_rate": learning_rate,
                "resume_adagrad": resume_same_plan("adagrad"),
                "resume_row_wise_adagrad": resume_same_plan("row_wise_adagrad"),
                "resume_adam": resume_same_plan("adam"),
                "resume_on_other_ranks": resume_on_other_ranks,
                "resume_adam_on_one_rank_of_two": resume_adam_on_one_rank_of_two,
                "weights_between_table_wise_and_data_parallel": (
                    weights_between_table_wise_and_data_parallel
                ),
                "dtensor_state": dtensor_state,
                "adagrad_state_between_shardings": optimizer_state_between_shardings("adagrad"),
                "adam_state_between_shardings": optimizer_state_between_shardings("adam"),
                "sgd_between_shardings": optimizer_state_between_shardings("sgd"),
                "resume_sgd": resume_same_plan("sgd"),
                "rank_without_tables_sgd": rank_without_tables("sgd"),
                "rank_without_tables_adam": rank_without_tables("adam"),
            }
        )
