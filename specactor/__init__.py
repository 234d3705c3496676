"""SpecActor: reinforcement learning of language models with lossless speculative rollouts."""

__version__ = "0.1.0"
