"""The tree of frozen dataclasses that describes a run. PURE.

Rules on one section stand in its ``__post_init__``, those across sections in `Config`, those on the world size or the
model's shape in `parallel.layout.check`.
"""

from specactor.config.data import DataConfig, SourceConfig
from specactor.config.rollout import EngineConfig, RolloutConfig, WeightsSyncConfig
from specactor.config.run import (
    CheckpointConfig,
    Config,
    EvalConfig,
    ModelConfig,
    ParallelConfig,
    TinyModelConfig,
    TrackingConfig,
)
from specactor.config.speculation import DRAFTERS, EAGLE3_HEAD, MAX_WINDOW, SpeculationConfig
from specactor.config.train import (
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    DistillationConfig,
    DraftTrainingConfig,
    TrainConfig,
    WarmupConfig,
)

__all__ = [
    "DRAFTERS",
    "EAGLE3_HEAD",
    "MAX_WINDOW",
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "CorrectionConfig",
    "CriticConfig",
    "DataConfig",
    "DistillationConfig",
    "DraftTrainingConfig",
    "EngineConfig",
    "EvalConfig",
    "ModelConfig",
    "ParallelConfig",
    "RolloutConfig",
    "SourceConfig",
    "SpeculationConfig",
    "TinyModelConfig",
    "TrackingConfig",
    "TrainConfig",
    "WarmupConfig",
    "WeightsSyncConfig",
]
