"""The training job's configuration: YAML in, frozen typed objects out. Imports no torch."""

from __future__ import annotations

from torchrec_flowtt.config.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DivergedError,
    Interrupted,
    JobError,
    RunFolderError,
)
from torchrec_flowtt.config.loading import load_config, parse_config
from torchrec_flowtt.config.schema import (
    CheckpointConfig,
    DataConfig,
    DenseOptimizerConfig,
    JobConfig,
    ModelConfig,
    OptimizerConfig,
    SparseOptimizerConfig,
    TableRule,
    TrainConfig,
)
from torchrec_flowtt.config.selection import select_rules

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "ConfigError",
    "DataConfig",
    "DataError",
    "DenseOptimizerConfig",
    "DivergedError",
    "Interrupted",
    "JobConfig",
    "JobError",
    "ModelConfig",
    "OptimizerConfig",
    "RunFolderError",
    "SparseOptimizerConfig",
    "TableRule",
    "TrainConfig",
    "load_config",
    "parse_config",
    "select_rules",
]
