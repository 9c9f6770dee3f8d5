"""Checks that sharded models load checkpoints whose tables were decomposed or reconstructed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.distributed.checkpoint_jobs import OPTIMIZERS, Job, shared_folder, weights
from tests.distributed.sharded_models import Table
from tests.reference import dense_table
from tests.tolerances import assert_close
from torchrec_flowtt.checkpoints import decompose_checkpoint, reconstruct_checkpoint

_ROWS = {"tt_a": 57, "tt_b": 40}  # 57 rows of 4 x 4 x 4: some are padding
_KEY = "sparse.embedding_bags.{}.{}"


def _job(tt: bool, first: str, second: str) -> Job:
    tables = [
        Table("tt_a", first, ["a", "b"], rows=_ROWS["tt_a"], dim=8, tt=tt),
        Table("tt_b", second, ["c"], rows=_ROWS["tt_b"], dim=12, tt=tt),
        Table("fb_tw", "tw1", ["d"], tt=False),
    ]
    return Job(tables, OPTIMIZERS["adagrad"])


def _cores(found: dict[str, torch.Tensor], table: str) -> list[torch.Tensor]:
    return [found[_KEY.format(table, f"tt_cores.{k}")] for k in range(3)]


def _on_first(convert: Any) -> None:
    if dist.get_rank() == 0:
        convert()
    dist.barrier()


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The tables, and what was not converted, on rank 0."""
    if dist.get_rank() > 0:
        return
    for table, rows in _ROWS.items():
        weight = found[_KEY.format(table, "weight")]
        assert_close(weight, dense_table(_cores(expected, table))[:rows], table, slack=4)
    key = _KEY.format("fb_tw", "weight")
    assert torch.equal(found[key], expected[key])


def converted_tables_load() -> None:
    """Cores of a sharded model, reconstructed for FBGEMM, trained there, and decomposed again."""
    folder = Path(shared_folder())
    ours = _job(True, "tw0", "dp")
    ours.train(range(2))
    dcp.save(ours.state(), checkpoint_id=folder / "cores")
    _on_first(lambda: reconstruct_checkpoint(folder / "cores", folder / "weights", _ROWS))
    torch.manual_seed(99)
    theirs = _job(False, "tw1", "rw")
    theirs.load(str(folder / "weights"), optimizer=False)
    _assert_equal(weights(theirs), weights(ours))

    # What came from cores has the ranks of cores.
    dcp.save(theirs.state(), checkpoint_id=folder / "again")
    shapes = {table: {"tt_ranks": (3, 2)} for table in _ROWS}
    _on_first(lambda: decompose_checkpoint(folder / "again", folder / "decomposed", shapes))
    torch.manual_seed(98)
    last = _job(True, "tw1", "tw0")
    state = last.state()
    # The optimizer's state of the tables converted is new, that of the others is loaded.
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=folder / "decomposed", planner=planner)
    last.model.load_state_dict(state["model"])
    last.optimizer.load_state_dict(state["optimizer"])
    _assert_equal(weights(theirs), weights(last))
    assert all(torch.isfinite(torch.tensor(last.train(range(2, 3)))))
