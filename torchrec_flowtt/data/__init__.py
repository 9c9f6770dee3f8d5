"""MovieLens interactions to TorchRec batches."""

from __future__ import annotations

from torchrec_flowtt.data.features import Dataset, SparseFeature, build_dataset
from torchrec_flowtt.data.fetch import prepare_data
from torchrec_flowtt.data.parsing import read_interactions

__all__ = ["Dataset", "SparseFeature", "build_dataset", "prepare_data", "read_interactions"]
