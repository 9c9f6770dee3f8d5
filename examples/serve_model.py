"""From a training job to a program that serves the model: checkpoint, precision, export.

    python examples/serve_model.py --folder /tmp/served

trains the model of `mixed_tables.py` for a few steps in one process, writes a checkpoint, and goes
on from there as a serving job would, which needs neither the sharding plan nor the optimizer. The
last step runs in a process of its own, which imports neither TorchRec nor FBGEMM. More processes
may train, as in `mixed_tables.py`: the checkpoint is the same.
"""

from __future__ import annotations

import argparse
import copy
import gc
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.model_parallel import get_default_sharders
from torchrec.inference.modules import quantize_inference_model
from torchrec.optim.optimizers import in_backward_optimizer_filter

from torchrec_flowtt import (
    FlowTTEmbeddingBagCollection,
    FlowTTEmbeddingBagCollectionSharder,
    FlowTTEmbeddingBagConfig,
    FlowTTEmbeddingShardingPlanner,
)
from torchrec_flowtt.inference import (
    TensorInputs,
    export_with_dynamic_batch,
    flowtt_quantization_mapping,
)

KEYS = ["ad_id", "country"]
ADS, COUNTRIES = 100_000, 250


class ClickModel(nn.Module):
    """Two embeddings, pooled per example, and a linear layer."""

    def __init__(self, device: torch.device) -> None:
        """The tables on `device`; on meta they take no memory."""
        super().__init__()
        self.sparse = FlowTTEmbeddingBagCollection(
            device=device,
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
        # By key: the order of the columns in values() is another one after quantisation.
        both = torch.cat([pooled["ad_id"], pooled["country"]], dim=1)
        return self.dense(both).squeeze(-1)


def random_batch(batch_size: int) -> KeyedJaggedTensor:
    """Up to three ads and one country an example."""
    lengths = torch.cat([torch.randint(0, 4, (batch_size,)), torch.ones(batch_size).long()])
    ads = torch.randint(ADS, (int(lengths[:batch_size].sum()),))
    countries = torch.randint(COUNTRIES, (batch_size,))
    return KeyedJaggedTensor(KEYS, torch.cat([ads, countries]), lengths=lengths)


def request() -> KeyedJaggedTensor:
    """Two ads and a country."""
    return KeyedJaggedTensor(KEYS, torch.tensor([7, 12345, 42]), lengths=torch.tensor([2, 1]))


def train(checkpoint: Path, store: Path) -> None:
    """Trains the model for a few steps and writes a checkpoint."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    model = ClickModel(torch.device("meta"))
    fused_params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02}
    sharders = [FlowTTEmbeddingBagCollectionSharder(fused_params), *get_default_sharders()]
    plan = FlowTTEmbeddingShardingPlanner().collective_plan(model, sharders)
    device = torch.device("cpu")
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    remaining = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = torch.optim.Adagrad(remaining.values(), lr=0.02)
    for _ in range(3):
        clicks = torch.randint(2, (32,)).float()
        dense.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(random_batch(32)), clicks).backward()
        dense.step()
    dcp.save({"model": model.state_dict()}, checkpoint_id=checkpoint)
    with torch.no_grad():
        print("trained", model(request()).tolist())
    dist.destroy_process_group()
    del model
    gc.collect()  # as in mixed_tables.py


def load(checkpoint: Path, device: torch.device) -> ClickModel:
    """The trained model on one device, from a checkpoint of any sharding plan."""
    model = ClickModel(device)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
    model.load_state_dict(state["model"])
    return model.eval()


def quantize(model: ClickModel) -> ClickModel:
    """A copy with 8-bit rows in the uncompressed table, and bfloat16 TT-cores."""
    return quantize_inference_model(
        copy.deepcopy(model),
        quantization_mapping=flowtt_quantization_mapping(),
        per_table_weight_dtype={"ads": torch.bfloat16},
    )


def export(model: ClickModel, package: Path) -> None:
    """Compiles the model ahead of time, for any batch size."""
    features = random_batch(4)
    inputs = (features.values(), features.lengths().view(len(KEYS), -1))
    program = export_with_dynamic_batch(TensorInputs(model, KEYS), inputs)
    torch._inductor.aoti_compile_and_package(program, package_path=str(package))


SERVE = """
import sys
import torch
import torchrec_flowtt.ops

serve = torch._inductor.aoti_load_package(sys.argv[1])
values, lengths = torch.tensor([7, 12345, 42]), torch.tensor([[2], [1]])
print("served", serve(values, lengths).tolist())
"""


def main() -> None:
    """Everything, one step after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="for checkpoint and package; default temporary")
    folder = parser.parse_args().folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    train(folder / "checkpoint", Path(tempfile.mkdtemp()) / "store")

    model = load(folder / "checkpoint", torch.device("cpu"))
    model.sparse.keep_packed_cores()  # of use on CUDA only
    with torch.no_grad():
        print("loaded", model(request()).tolist())
        print("quantized", quantize(model)(request()).tolist())

    export(model, folder / "model.pt2")
    print(subprocess.check_output([sys.executable, "-c", SERVE, folder / "model.pt2"], text=True))


if __name__ == "__main__":
    main()
