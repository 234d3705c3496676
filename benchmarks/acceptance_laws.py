"""What acceptance is measured against: the laws of target and draft model at every emitted token, by transformers.

Shape legend: N positions, V vocabulary, T tokens of one response, K temperatures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specactor.cpu import torchvision_ops
from specactor.cpu.sglang_ops import sample_with_noise
from specactor.types import RolloutRequest, Trajectory

TOGETHER = 128  # responses of one forward pass

Hits = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Laws:
    """Of one response, at temperature 1; one entry per token."""

    overlap: list[float]
    """1 - TV(target, draft) = sum over v of min(p(v), q(v)): no drafter that samples from q is accepted more often."""
    entropy: list[float]  # of the target, in nats
    hits: Hits
    """[T, K] whether the draft model, at the k-th temperature and with the token's own noise, drafts the token."""


def overlap(logp_NV: Tensor, logq_NV: Tensor) -> Tensor:
    """sum over v of min(p(v), q(v)): [N]"""
    return torch.minimum(logp_NV.exp(), logq_NV.exp()).sum(-1)


def entropy(logp_NV: Tensor) -> Tensor:
    """-sum over v of p(v) log p(v), in nats: [N]"""
    surprise_NV: Tensor = torch.special.entr(logp_NV.exp())
    return surprise_NV.sum(-1)


def drafted(logq_NV: Tensor, seeds_N: Tensor, positions_N: Tensor, temperature: float) -> Tensor:
    """argmax_v [log q(v) / temperature + G(v)], G the noise of sampling; 0: argmax_v log q(v). int64 [N]"""
    if temperature == 0:
        return logq_NV.argmax(-1)
    return sample_with_noise(logq_NV / temperature, seeds_N, positions_N).view(-1)


@torch.no_grad()
def laws(
    target: Path,
    draft: Path,
    requests: Sequence[RolloutRequest],
    done: Sequence[Trajectory],
    temperatures: Sequence[float],
) -> list[Laws]:
    """Per response; forward passes in float32, the rest in float64."""
    if torch.version.cuda is None:
        torchvision_ops.install()
    from transformers import AutoModelForCausalLM

    p_model, q_model = (AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32).eval() for d in (target, draft))
    found: dict[int, Laws] = {}
    order = sorted(range(len(done)), key=lambda i: len(done[i].prompt_ids) + len(done[i].token_ids))
    for first in range(0, len(order), TOGETHER):
        part = order[first : first + TOGETHER]
        texts = [[*done[i].prompt_ids, *done[i].token_ids] for i in part]
        ids = torch.zeros(len(part), max(map(len, texts)), dtype=torch.int64)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        logp, logq = (model(ids, use_cache=False).logits.double().log_softmax(-1) for model in (p_model, q_model))
        for row, i in enumerate(part):
            before = len(done[i].prompt_ids) - 1
            here = slice(before, before + len(done[i].token_ids))
            found[i] = _laws(logp[row, here], logq[row, here], requests[i].seed, done[i], temperatures)
    return [found[i] for i in range(len(done))]


def _laws(logp_TV: Tensor, logq_TV: Tensor, seed: int, t: Trajectory, temperatures: Sequence[float]) -> Laws:
    length = len(t.token_ids)
    seeds_T, positions_T = torch.full((length,), seed), torch.arange(length) + len(t.prompt_ids) - 1
    tokens_T = torch.tensor(t.token_ids)
    hits_KT = [(drafted(logq_TV, seeds_T, positions_T, kind) == tokens_T).numpy() for kind in temperatures]
    return Laws(
        overlap=overlap(logp_TV, logq_TV).tolist(), entropy=entropy(logp_TV).tolist(), hits=np.stack(hits_KT, axis=1)
    )
