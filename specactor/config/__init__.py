"""The tree of frozen dataclasses that describes a run. PURE.

Rules on one section stand in its ``__post_init__``, those across sections in `Config`, those on the world size or the
model's shape in `parallel.layout.check`.
"""

from specactor.config.data import DataConfig as DataConfig
from specactor.config.data import SourceConfig as SourceConfig
from specactor.config.rollout import EngineConfig as EngineConfig
from specactor.config.rollout import RolloutConfig as RolloutConfig
from specactor.config.rollout import WeightsSyncConfig as WeightsSyncConfig
from specactor.config.run import CheckpointConfig as CheckpointConfig
from specactor.config.run import Config as Config
from specactor.config.run import EvalConfig as EvalConfig
from specactor.config.run import ModelConfig as ModelConfig
from specactor.config.run import ParallelConfig as ParallelConfig
from specactor.config.run import TinyModelConfig as TinyModelConfig
from specactor.config.run import TrackingConfig as TrackingConfig
from specactor.config.speculation import EAGLE3_HEAD as EAGLE3_HEAD
from specactor.config.speculation import MAX_WINDOW as MAX_WINDOW
from specactor.config.speculation import SpeculationConfig as SpeculationConfig
from specactor.config.train import AlgorithmConfig as AlgorithmConfig
from specactor.config.train import CorrectionConfig as CorrectionConfig
from specactor.config.train import CriticConfig as CriticConfig
from specactor.config.train import DistillationConfig as DistillationConfig
from specactor.config.train import DraftTrainingConfig as DraftTrainingConfig
from specactor.config.train import TrainConfig as TrainConfig
from specactor.config.train import WarmupConfig as WarmupConfig
