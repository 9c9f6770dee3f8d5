"""Initial weights of a table that depend on the seed and the table's name alone."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from torchrec_flowtt.train.processes import launched_world


@dataclass(frozen=True)
class SeededUniform:
    """TorchRec's default initialisation, uniform in +-1/sqrt(N), from a generator of its own.

    So a table starts the same wherever the planner puts it, whatever other tables are there, and
    however those are stored: two runs that differ in the kernel of some tables begin alike in all
    others. A rank that holds only a part of a table (row-wise or column-wise) draws its own.

    Attributes:
        table: name of the table.
        num_embeddings: N.
        embedding_dim: D.
        seed: of the run.

    >>> a, b = torch.empty(3, 4), torch.empty(3, 4)
    >>> for weight in (a, b):
    ...     _ = SeededUniform("user", 3, 4, seed=1)(weight)
    >>> torch.equal(a, b), bool(a.abs().max() <= 3**-0.5)
    (True, True)
    """

    table: str
    num_embeddings: int
    embedding_dim: int
    seed: int

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """Fills ``weight``, the table [N, D] or this rank's part of it, in place."""
        whole = tuple(weight.shape) == (self.num_embeddings, self.embedding_dim)
        part = "" if whole else f"/rank {launched_world()[0]}"
        digest = hashlib.sha256(f"{self.seed}/{self.table}{part}".encode()).digest()
        generator = torch.Generator(device=weight.device)
        generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        bound = self.num_embeddings**-0.5
        with torch.no_grad():
            return weight.uniform_(-bound, bound, generator=generator)
