"""Collections with FP16 and BF16 tables, eager and exported, against float64."""

from __future__ import annotations

import pytest
import torch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType

from tests.inference.exported_collections import export_collection, tensors
from tests.inference.served_models import (
    Model,
    batch,
    collection,
    fb_table,
    mixed_tables,
    tt_expected,
    tt_table,
)
from tests.tolerances import assert_close
from torchrec_flowtt.distributed import FlowTTEmbeddingBagCollection
from torchrec_flowtt.functional import to_dense


def tables(data_type: DataType) -> list[EmbeddingBagConfig]:
    """Sum and mean, two and three cores, beside an uncompressed table of the same type."""
    return [
        tt_table("sum", ["a", "b"], data_type=data_type),
        tt_table("mean", ["c"], 12, num_cores=2, pooling=PoolingType.MEAN, data_type=data_type),
        fb_table("uncompressed", ["d"], data_type=data_type),
    ]


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
@pytest.mark.parametrize("weighted", [False, True])
def test_values(data_type: DataType, weighted: bool) -> None:
    """Sums are rounded once, to the cores' dtype, in which the unsharded collection pools."""
    ebc = collection(tables(data_type), weighted).eval()
    configs = ebc.tt_tables()
    dtype = configs["sum"].dtype
    assert dtype in (torch.float16, torch.bfloat16)
    # Of an uncompressed BF16 table TorchRec makes one of FP16.
    assert {core.dtype for name in configs for core in ebc.tt_cores(name)} == {dtype}
    assert ebc.embedding_bags["uncompressed"].weight.dtype == torch.float16
    program = export_collection(ebc, strict=False).module()
    for size in (7, 1):
        features = batch(size, weighted=weighted)
        with torch.no_grad():
            output = ebc(features)
            exported = program(*tensors(size, 4, weighted))
        assert output.values().dtype == exported.dtype == torch.float32
        assert torch.equal(output.values(), exported)
        for name, config in configs.items():
            for feature in config.feature_names:
                expected = tt_expected(config, ebc.tt_cores(name), features, feature)
                rounded = output[feature].to(dtype)
                assert torch.equal(rounded.float(), output[feature])
                assert_close(rounded, expected.detach(), feature)


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_weights_of_a_float32_training_are_loaded_into_it(data_type: DataType) -> None:
    """The state dict has the same keys; the cores' rounding is what the table loses."""
    trained = Model(collection(mixed_tables()))
    served_tables = mixed_tables()
    for config in served_tables:
        config.data_type = data_type
    served = Model(FlowTTEmbeddingBagCollection(tables=served_tables))
    served.load_state_dict(trained.state_dict())
    unit = torch.finfo(served.sparse.tt_tables()["tt_0"].dtype).eps / 2
    for name in served.sparse.tt_tables():
        rounded, exact = (
            to_dense([core.double() for core in model.sparse.tt_cores(name)], 60)
            for model in (served, trained)
        )
        magnitudes = to_dense([core.double().abs() for core in trained.sparse.tt_cores(name)], 60)
        error = (rounded - exact).abs()
        assert (error <= 3.1 * unit * magnitudes).all()  # three cores, each rounded once
        assert error.max() > 0
    features = batch(6)
    with torch.no_grad():
        output, expected = served(features), trained(features)
    assert output.keys() == expected.keys()
    scale = expected.values().abs().max()
    assert (output.values() - expected.values()).abs().max() <= 40 * unit * scale
