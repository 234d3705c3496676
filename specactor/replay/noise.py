"""The noise of the engines' sampler, token by token."""

from __future__ import annotations

import math

import torch

from specactor.config import RolloutConfig
from specactor.cpu.sglang_ops import murmur_hash32
from specactor.replay.compare import Noise


def noise_of(rollout: RolloutConfig) -> Noise | None:
    """Return the noise of a run's responses; None with top-p, top-k or min-p, where its key is a token's rank."""
    return gumbel if (rollout.top_p, rollout.top_k, rollout.min_p) == (1.0, -1, 0.0) else None


def gumbel(seed: int, position: int, token: int) -> float:
    """What `specactor.cpu.sglang_ops.sample_with_noise` adds to the log-probability of a token at this position."""
    before = torch.tensor([position - 1])  # SGLang's key: the position of the token that the pass was given
    word = murmur_hash32(torch.tensor([seed]), before, torch.tensor([token]))
    uniform = int(word.item()) / (2**32 - 1)
    return -math.log(max(2.0**-32, -math.log(uniform) if uniform else math.inf))
