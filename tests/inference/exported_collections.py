"""Collections as exported programs, on the device that they are on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.export import ExportedProgram

from tests.exported_programs import SIZES, SLACK
from tests.inference.served_models import KEYS, batch, tt_expected
from tests.tolerances import assert_close
from torchrec_flowtt.distributed import FlowTTEmbeddingBagCollection
from torchrec_flowtt.inference import TensorInputs, export_with_dynamic_batch

# As many that 1 / 49 * 49 is below 1 in floating point.
MANY_KEYS = [*KEYS, *(f"unused_{n}" for n in range(49 - len(KEYS)))]


def tensors(
    size: int,
    longest: int,
    weighted: bool = False,
    device: torch.device | str = "cpu",
    keys: list[str] = KEYS,
) -> tuple[Tensor, ...]:
    """A batch as :class:`TensorInputs` takes it."""
    features = batch(size, longest, keys, weighted).to(torch.device(device))
    weights = (features.weights(),) if weighted else ()
    return (features.values(), features.lengths().view(len(keys), size), *weights)


def export_collection(
    ebc: FlowTTEmbeddingBagCollection, strict: bool, keys: list[str] = KEYS
) -> ExportedProgram:
    """The collection, for any batch size and number of lookups."""
    weighted = ebc.is_weighted()
    return export_with_dynamic_batch(
        TensorInputs(ebc, keys, weighted), tensors(5, 4, weighted, ebc.device, keys), strict=strict
    )


def check_collection(
    program: Callable[..., Tensor], ebc: FlowTTEmbeddingBagCollection, keys: list[str] = KEYS
) -> None:
    """Runs the program on batches of all sizes, beside the collection and the reference."""
    weighted = ebc.is_weighted()
    for size, longest in SIZES:
        inputs = tensors(size, longest, weighted, ebc.device, keys)
        features = batch(size, longest, keys, weighted)
        with torch.no_grad():
            output, eager = program(*inputs), ebc(features.to(ebc.device))
        torch.testing.assert_close(output, eager.values(), rtol=1e-5, atol=1e-5)
        blocks = iter(output.detach().cpu().split(eager.length_per_key(), dim=1))
        tt_tables = ebc.tt_tables()
        for config in ebc.embedding_bag_configs():
            for feature in config.feature_names:
                block = next(blocks)
                if config.name in tt_tables:
                    cores = [core.detach().cpu() for core in ebc.tt_cores(config.name)]
                    expected = tt_expected(config, cores, features, feature)
                    slack = SLACK[output.device.type]
                    assert_close(block, expected, f"{feature} of a batch of {size}", slack)
