"""A TT table and an FBGEMM table in one collection, sharded over the processes and trained.

    torchrun --standalone --nproc-per-node 2 examples/mixed_tables.py

The planner decides whether the TT table is table-wise, and then steps inside the backward pass with
the sharder's ``fused_params``, or data-parallel, and then belongs to the optimizer of the model's
remaining parameters. The program is the same for both. TorchRec and torch print a number of
warnings on the way, "Sharding spec not found" for a data-parallel TT table among them; none
matters.
"""

from __future__ import annotations

import gc
import os

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_flowtt import (
    FlowTTEmbeddingBagCollection,
    FlowTTEmbeddingBagCollectionSharder,
    FlowTTEmbeddingBagConfig,
    FlowTTEmbeddingShardingPlanner,
)

BATCH_SIZE = 32
ADS, COUNTRIES = 1_000_000, 250


class ClickModel(nn.Module):
    """Two embeddings, pooled per example, and a linear layer."""

    def __init__(self) -> None:
        """Tables on the meta device: nothing is allocated before sharding."""
        super().__init__()
        self.sparse = FlowTTEmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                FlowTTEmbeddingBagConfig(
                    name="ads",
                    num_embeddings=ADS,
                    embedding_dim=32,
                    feature_names=["ad_id"],
                    tt_ranks=(16, 16),
                ),
                EmbeddingBagConfig(
                    name="country",
                    num_embeddings=COUNTRIES,
                    embedding_dim=32,
                    feature_names=["country"],
                ),
            ],
        )
        self.dense = nn.Linear(64, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Logits ``[B]``."""
        pooled = self.sparse(features)
        # By key: the order of the columns in values() depends on the sharding plan.
        both = torch.cat([pooled["ad_id"], pooled["country"]], dim=1)
        return self.dense(both).squeeze(-1)


def random_batch(device: torch.device) -> tuple[KeyedJaggedTensor, torch.Tensor]:
    """Up to three ads and one country an example; a click if the first ad's number is even."""
    lengths = torch.randint(1, 4, (BATCH_SIZE,))
    ads = torch.randint(ADS, (int(lengths.sum()),))
    countries = torch.randint(COUNTRIES, (BATCH_SIZE,))
    first = torch.cumsum(lengths, 0) - lengths
    features = KeyedJaggedTensor(
        keys=["ad_id", "country"],
        values=torch.cat([ads, countries]),
        lengths=torch.cat([lengths, torch.ones(BATCH_SIZE, dtype=torch.int64)]),
    )
    return features.to(device), (ads[first] % 2 == 0).float().to(device)


def train(device: torch.device) -> None:
    """Plans, shards and trains the model on this process's device."""
    model = ClickModel()
    fused_params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02}
    sharders = [FlowTTEmbeddingBagCollectionSharder(fused_params), *get_default_sharders()]
    planner = FlowTTEmbeddingShardingPlanner()
    plan = planner.collective_plan(model, sharders)
    if dist.get_rank() == 0:
        for row in planner.placement_rows(plan):
            print(row)
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)

    remaining = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(remaining, lambda params: torch.optim.Adagrad(params, lr=0.02))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    loss_function = nn.BCEWithLogitsLoss()
    for step in range(10):
        features, clicks = random_batch(device)
        optimizer.zero_grad()
        loss = loss_function(model(features), clicks)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")


def main() -> None:
    """One process of the job."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(dist.get_rank())
    train(device)
    dist.destroy_process_group()
    # The sharded model holds the group too, in cycles of references. gloo's threads live as long as
    # the group, and one that releases a tensor while Python is shutting down aborts the process.
    gc.collect()


if __name__ == "__main__":
    main()
