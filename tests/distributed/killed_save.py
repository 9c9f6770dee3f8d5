"""Saves checkpoint ``one`` into a folder, and dies in the middle of ``two``; no process group.

Run by test_interrupted_checkpoint.py. The pattern is that of docs/torchrec.md: a checkpoint gets a
new folder, which has its final name once it is whole.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from torchrec_flowtt import TableBatchedFlowTTEmbeddingBags
from torchrec_flowtt.shapes import TTSpec


class KilledWriter(dcp.FileSystemWriter):
    """The process is killed when all data are written and the metadata are not."""

    def finish(self, metadata: Any, results: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def tables() -> TableBatchedFlowTTEmbeddingBags:
    """A small module with optimizer state."""
    spec = TTSpec.suggest(60, 8, tt_ranks=3)
    return TableBatchedFlowTTEmbeddingBags([spec], optimizer="exact_adagrad")


def step(module: TableBatchedFlowTTEmbeddingBags) -> None:
    """One step."""
    module(torch.arange(60), torch.arange(0, 61, 6)).square().sum().backward()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    module = tables()
    step(module)
    torch.save(module.state_dict(), folder / "expected.pt")
    for name, writer in (("one", dcp.FileSystemWriter), ("two", KilledWriter)):
        temporary = folder / f"{name}.tmp"
        dcp.save({"model": module.state_dict()}, storage_writer=writer(temporary))
        temporary.rename(folder / name)
        step(module)
