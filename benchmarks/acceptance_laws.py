"""What acceptance is measured against: the laws of target and draft model at every emitted token, by transformers.

Shape legend: N positions, V vocabulary, T tokens of one response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specactor.cpu import torchvision_ops
from specactor.rollout.planning.noise import Floats, gumbel
from specactor.types import RolloutRequest, Trajectory

TOGETHER = 128
"""Responses of one forward pass."""


@dataclass(frozen=True, kw_only=True)
class Laws:
    """Of one response, at temperature 1; one entry per token."""

    overlap: list[float]
    """1 - TV(target, draft) = sum over v of min(p(v), q(v)): no drafter that samples from q is accepted more often."""
    entropy: list[float]
    """Of the target, in nats."""
    agrees: dict[float, list[bool]] = field(default_factory=dict)
    """Per beta, whether argmax_v [beta log q(v) + G(v)] is the token, G the noise that the token was drawn with."""


def overlap(logp_NV: Tensor, logq_NV: Tensor) -> Tensor:
    """sum over v of min(p(v), q(v)): [N]"""
    return torch.minimum(logp_NV.exp(), logq_NV.exp()).sum(-1)


def entropy(logp_NV: Tensor) -> Tensor:
    """-sum over v of p(v) log p(v), in nats: [N]"""
    surprise_NV: Tensor = torch.special.entr(logp_NV.exp())
    return surprise_NV.sum(-1)


def agreement(logq_NV: Floats, noise_NV: Floats, tokens: Sequence[int], beta: float) -> list[bool]:
    """Whether argmax_v [beta log q(v) + G(v)] is the token."""
    scores_NV = logq_NV if math.isinf(beta) else beta * logq_NV + noise_NV
    drafted: list[bool] = (scores_NV.argmax(-1) == np.asarray(tokens)).tolist()
    return drafted


@torch.no_grad()
def laws(
    target: Path, draft: Path, requests: Sequence[RolloutRequest], done: Sequence[Trajectory], betas: Sequence[float]
) -> dict[str, Laws]:
    """Per request id; forward passes in float32, the rest in float64."""
    if torch.version.cuda is None:
        torchvision_ops.install()
    from transformers import AutoModelForCausalLM

    p_model, q_model = (AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32).eval() for d in (target, draft))
    found = {}
    pairs = sorted(zip(requests, done, strict=True), key=lambda pair: len(pair[1].prompt_ids) + len(pair[1].token_ids))
    for first in range(0, len(pairs), TOGETHER):
        part = pairs[first : first + TOGETHER]
        texts = [[*t.prompt_ids, *t.token_ids] for _, t in part]
        ids = torch.zeros(len(part), max(map(len, texts)), dtype=torch.int64)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        logp, logq = (model(ids, use_cache=False).logits.double().log_softmax(-1) for model in (p_model, q_model))
        for i, (request, t) in enumerate(part):
            before = len(t.prompt_ids) - 1
            here = slice(before, before + len(t.token_ids))
            found[request.request_id] = _laws(logp[i, here], logq[i, here], request, t, betas)
    return found


def _laws(logp_TV: Tensor, logq_TV: Tensor, request: RolloutRequest, t: Trajectory, betas: Sequence[float]) -> Laws:
    length, vocabulary = logp_TV.shape
    positions_T = np.arange(length) + len(t.prompt_ids) - 1
    noise_TV = gumbel(
        np.full(length, request.seed), positions_T, np.broadcast_to(np.arange(vocabulary), (length, vocabulary))
    )
    return Laws(
        overlap=overlap(logp_TV, logq_TV).tolist(),
        entropy=entropy(logp_TV).tolist(),
        agrees={beta: agreement(logq_TV.numpy(), noise_TV, t.token_ids, beta) for beta in betas},
    )
