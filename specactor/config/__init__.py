"""One tree of frozen dataclasses that describes a run; every field is validated when the tree is built. PURE.

A recipe (``examples/``) is a function that returns a `Config`; the command line overrides fields by dotted path.
Checks that need only one section are in its ``__post_init__``; checks across sections are in `Config`; checks that also
need the world size and the model's shape are in `specactor.parallel.layout.check`.

    run            Config: the whole tree, and the rules across sections
    model          ModelConfig, TinyModelConfig
    data           DataConfig, SourceConfig
    parallel       ParallelConfig
    rollout        RolloutConfig
    engine         EngineConfig, WeightsSyncConfig
    speculation    SpeculationConfig, MAX_WINDOW, DRAFTERS
    algorithm      AlgorithmConfig, CorrectionConfig, CriticConfig
    train          WarmupConfig, TrainConfig
    distillation   DistillationConfig, DraftTrainingConfig
    results        CheckpointConfig, EvalConfig, TrackingConfig
    rules          the form of every check

Other packages import from here: which module holds a name may change.
"""

from specactor.config.algorithm import AlgorithmConfig, CorrectionConfig, CriticConfig
from specactor.config.data import DataConfig, SourceConfig
from specactor.config.distillation import DistillationConfig, DraftTrainingConfig
from specactor.config.engine import EngineConfig, WeightsSyncConfig
from specactor.config.model import ModelConfig, TinyModelConfig
from specactor.config.parallel import ParallelConfig
from specactor.config.results import CheckpointConfig, EvalConfig, TrackingConfig
from specactor.config.rollout import RolloutConfig
from specactor.config.run import Config
from specactor.config.speculation import DRAFTERS, MAX_WINDOW, SpeculationConfig
from specactor.config.train import TrainConfig, WarmupConfig

__all__ = [
    "DRAFTERS",
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
