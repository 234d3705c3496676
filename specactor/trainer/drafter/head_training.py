"""An EAGLE-3 head learns offline: the target is run beside it, for its hidden states and its distribution.

Shape legend: T tokens, N response tokens, V vocabulary, W vocabulary of the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specactor.config import DraftTrainingConfig
from specactor.trainer.drafter import losses
from specactor.trainer.drafter.head import Head, features_of
from specactor.trainer.drafter.train import DrafterTrainer

STEPS = 4  # drafted tokens that a head learns from at every position
DECAY = 0.8  # weight of a step beside the one before it, which more drafts reach


def logprobs(target: Any, head: Head, batch: losses.Batch, *, steps: int) -> list[Tensor]:
    """Return [N, V] log-probabilities of the target's, then those of every step of the head: -inf where it drafts
    nothing, at tokens that it does not know and at places of a response that a step does not reach."""
    with torch.no_grad():
        features, logits = features_of(target, batch.tokens_BT, head.layers)
        made = [losses.draft_logprobs(logits.flatten(0, 1)[batch.row_N], batch.temperatures_N)]
    for step, drafted in enumerate(head(batch.tokens_BT, features, steps=steps)):
        logq_NW = losses.draft_logprobs(drafted.flatten(0, 1)[batch.row_N], batch.temperatures_N)
        whole_NV = torch.full_like(made[0], -torch.inf).index_copy(1, head.token_ids, logq_NW)
        made.append(whole_NV.masked_fill(batch.place_N[:, None] <= step, -torch.inf))
    return made


class HeadTrainer(DrafterTrainer):
    """A head with its optimizer and buffer, in one process."""

    def __init__(self, config: DraftTrainingConfig, head: Head, target: Any, *, seed: int) -> None:
        """Take a causal model of transformers as target."""
        super().__init__(config, head, seed=seed)
        self._head, self._target = head, target

    def _loss(self, batch: losses.Batch) -> tuple[Tensor, Tensor]:
        """Mean over the steps of KL(target, head), of as much of the target as the head's vocabulary covers."""
        logp_NV, *by_step = logprobs(self._target, self._head, batch, steps=STEPS)
        p_NV = logp_NV.exp()
        weights = [DECAY**step for step in range(STEPS)]
        loss, first = logp_NV.new_zeros(()), by_step[0].detach()
        for weight, logq_NV in zip(weights, by_step, strict=True):
            loss = loss + weight / sum(weights) * _kl(p_NV, logp_NV, logq_NV).sum()
        known = (batch.place_N > 0).sum().double()
        sums = [loss.detach().double(), _kl(p_NV, logp_NV, first).sum().double()]
        sums += [torch.minimum(p_NV, first.exp()).sum().double(), known]
        return loss, torch.stack([*sums, known.new_tensor(float(len(p_NV)))])


def _kl(p_NV: Tensor, logp_NV: Tensor, logq_NV: Tensor) -> Tensor:
    """[N], over the tokens that the head knows; 0 where it drafts nothing."""
    known_NV = logq_NV.isfinite()
    difference_NV = logp_NV - logq_NV.where(known_NV, torch.zeros_like(logq_NV))
    return (p_NV * difference_NV).where(known_NV, torch.zeros_like(p_NV)).sum(1)
