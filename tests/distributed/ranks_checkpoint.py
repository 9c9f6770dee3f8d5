"""Checks of checkpoints with torch.distributed.checkpoint; run by test_checkpoint.py.

With ``--load FOLDER`` the script loads, on however many ranks, what two ranks saved before:
``resharded.py`` has these checks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.distributed import resharded
from tests.distributed.async_checkpoint import asynchronous_save
from tests.distributed.checkpoint_jobs import (
    OPTIMIZERS,
    Job,
    assert_same,
    shared_folder,
    tables,
    weights,
)
from tests.distributed.converted_tables import converted_tables_load
from tests.distributed.sharded_models import Table, batch, dense_parameters
from tests.distributed.torchrun_launcher import run_on_rank
from torchrec_flowtt.distributed.optimizer_states import saved_in_other_sharding


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


def dtensor_env() -> ShardingEnv:
    group = dist.GroupMember.WORLD
    return ShardingEnv(dist.get_world_size(), dist.get_rank(), group, output_dtensor=True)


def asynchronous_dtensor() -> None:
    asynchronous_save("adagrad", env=dtensor_env())()


def dtensor_state() -> None:
    job = Job(tables("tw0", "tw1", "dp"), OPTIMIZERS["adagrad"], env=dtensor_env())
    key = "sparse.embedding_bags.tt_a.tt_cores.0"
    assert isinstance(job.model.state_dict()[key], DTensor)
    assert job.model.state_dict()[key].shape == job.tables[0].config().tt_spec.core_shapes[0]
    job.train(range(3))
    folder = shared_folder()
    dcp.save(job.state(), checkpoint_id=folder)
    expected = job.train(range(3, 5))
    torch.manual_seed(99)
    resumed = Job(tables("tw0", "tw1", "dp"), OPTIMIZERS["adagrad"], env=dtensor_env())
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


if __name__ == "__main__":
    if sys.argv[1] == "--load":
        run_on_rank(resharded.load_checks(Path(sys.argv[2])))
    else:
        run_on_rank(
            {
                **resharded.save_checks(Path(sys.argv[1])),
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
                "asynchronous_adagrad": asynchronous_save("adagrad"),
                "asynchronous_adam": asynchronous_save("adam"),
                "asynchronous_dtensor": asynchronous_dtensor,
                "converted_tables_load": converted_tables_load,
                "adagrad_state_between_shardings": optimizer_state_between_shardings("adagrad"),
                "adam_state_between_shardings": optimizer_state_between_shardings("adam"),
                "sgd_between_shardings": optimizer_state_between_shardings("sgd"),
                "resume_sgd": resume_same_plan("sgd"),
                "rank_without_tables_sgd": rank_without_tables("sgd"),
                "rank_without_tables_adam": rank_without_tables("adam"),
            }
        )
