"""An EAGLE-3 head learns: offline from the target, in a run from what the policy's update computed.

Shapes as in `drafter.losses`; W vocabulary of the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from specactor.config import DraftTrainingConfig
from specactor.config.rules import rules_of
from specactor.config.train import HEAD_STEPS
from specactor.trainer.drafter import losses
from specactor.trainer.drafter.head import EMBEDDING, Head, features_of
from specactor.trainer.drafter.recorder import SURELY_NOT
from specactor.trainer.drafter.train import DrafterTrainer
from specactor.trainer.drafter.updates import PlainUpdater


def logprobs(target: Any, head: Head, batch: losses.Batch, *, steps: int) -> list[Tensor]:
    """Return [N, V] of the target, then of every step of the head: -inf at tokens and places that it does not reach."""
    with torch.no_grad():
        features, logits = features_of(target, batch.tokens_BT, head.layers)
        made = [losses.draft_logprobs(logits.flatten(0, 1)[batch.row_N], batch.temperatures_N)]
    for step, drafted in enumerate(head(batch.tokens_BT, features, steps=steps)):
        logq_NW = losses.draft_logprobs(drafted.flatten(0, 1)[batch.row_N], batch.temperatures_N)
        whole_NV = torch.full_like(made[0], -torch.inf).index_copy(1, head.token_ids, logq_NW)
        made.append(whole_NV.masked_fill(batch.place_N[:, None] <= step, -torch.inf))
    return made


class HeadTrainer(DrafterTrainer):
    """With `target` it learns offline; without, from examples with the policy's states."""

    def __init__(
        self,
        config: DraftTrainingConfig,
        head: Head,
        *,
        seed: int,
        group: dist.ProcessGroup | None = None,
        target: Any = None,
    ) -> None:
        """Raise ConfigError with ZeRO. Collective."""
        rules_of(config, "distillation")(
            "zero", config.zero == "off", "off with an EAGLE-3 head", "It is small: ZeRO has nothing to divide."
        )
        super().__init__(config, head, seed=seed, group=group)
        self._head, self._target = head, target
        vocab, known = len(head.embedding), len(head.token_ids)
        self._column_V = torch.full((vocab,), known, device=self.device)
        """The head's logit of each of the target's tokens; one beyond the last: it cannot draft that one."""
        self._column_V[head.token_ids] = torch.arange(known, device=self.device)

    def fixed_weights(self) -> list[tuple[str, Tensor]]:
        return [(EMBEDDING, self._head.embedding)] if self._head.owns_embedding else []

    def _loss(self, batch: losses.Batch) -> tuple[Tensor, Tensor]:
        """Average KL(policy, head) over the steps."""
        weights = [0.8**step for step in range(HEAD_STEPS)]  # fewer drafts reach a step than the one before
        loss, first, overlap = torch.zeros((), device=self.device), None, torch.zeros((), device=self.device)
        by_step = self._from_target(batch) if self._target is not None else self._from_policy(batch)
        for weight, (kl_N, overlap_N) in zip(weights, by_step, strict=True):
            loss = loss + weight / sum(weights) * kl_N.sum()
            if first is None:
                first, overlap = kl_N.detach().sum(), overlap_N.sum()
        known = (batch.place_N > 0).sum().double()
        assert first is not None
        sums = [loss.detach().double(), first.double(), overlap.double(), known]
        return loss, torch.stack([*sums, known.new_tensor(float(len(batch.place_N)))])

    def _from_target(self, batch: losses.Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (KL [N], overlap [N]) of every step."""
        logp_NV, *by_step = logprobs(self._target, self._head, batch, steps=HEAD_STEPS)
        p_NV = logp_NV.exp()
        for logq_NV in by_step:
            yield _kl(p_NV, logp_NV, logq_NV), torch.minimum(p_NV, logq_NV.detach().exp()).sum(1)

    def _from_policy(self, batch: losses.Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """The same, over the policy's top-k and all others as one."""
        states_BTF, size = batch.states_BTF, self._head.config.target_hidden_size
        if states_BTF is None:  # an empty micro-batch
            num = len(self._head.layers_learned) * size
            states_BTF = torch.zeros((*batch.tokens_BT.shape, num), device=self.device)
        embedded = None
        if not self._head.owns_embedding:
            embedded, states_BTF = states_BTF[..., :size], states_BTF[..., size:]
        columns_NK, logp_NK = self._column_V[batch.top_tokens_NK], batch.top_logp_NK
        num_known = len(self._head.token_ids)
        unknown_NK = columns_NK == num_known
        # what is certain to be lost, since the head cannot draft it, is no distance
        lost_N = (logp_NK.exp() * (logp_NK - SURELY_NOT)).where(unknown_NK, torch.zeros_like(logp_NK)).sum(1)
        assert isinstance(self._updater, PlainUpdater)

        def of_rows(step: int, logits_PW: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            rows = batch.rows(part)
            logq_PW = losses.draft_logprobs(logits_PW, rows.temperatures_N)
            if num_known < len(self._column_V):
                logq_PW = functional.pad(logq_PW, (0, 1), value=SURELY_NOT)
            kl_P = losses.forward_kl(logq_PW, columns_NK[part], rows.top_logp_NK) - lost_N[part]
            overlap_P = losses.overlap(logq_PW.detach(), columns_NK[part], rows.top_logp_NK)
            reached_P = rows.place_N > step
            return kl_P.where(reached_P, torch.zeros_like(kl_P)), overlap_P.where(reached_P, torch.zeros_like(kl_P))

        for step, logits in enumerate(self._updater.replica(batch.tokens_BT, states_BTF, embedded, steps=HEAD_STEPS)):
            if columns_NK.shape[1]:
                yield losses.by_parts(partial(of_rows, step), logits.flatten(0, 1), batch.row_N)
            else:  # an empty micro-batch takes part in the reduction
                yield 0.0 * logits.sum()[None], logits.new_zeros(1)


def _kl(p_NV: Tensor, logp_NV: Tensor, logq_NV: Tensor) -> Tensor:
    """Return KL [N] over the tokens that the head knows."""
    known_NV = logq_NV.isfinite()
    difference_NV = logp_NV - logq_NV.where(known_NV, torch.zeros_like(logq_NV))
    return (p_NV * difference_NV).where(known_NV, torch.zeros_like(p_NV)).sum(1)
