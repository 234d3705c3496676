"""What one micro-batch contributes to an update's loss and statistics.

Shapes: T packed tokens of this rank, V its shard of the vocabulary, R response positions among the T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from specactor.config import AlgorithmConfig
from specactor.cpu.sglang_ops import noise_of
from specactor.hooks import loss_by
from specactor.trainer.logprobs import vocab_parallel_logprobs, vocab_parallel_top_k
from specactor.trainer.losses import LossKind, correction_weights_T, kl_T, policy_loss_T
from specactor.trainer.microbatch import MicroBatch

SLACK = {"float32": 1e-3, "bfloat16": 2.0}
"""Nats by which another token must score more than the sampled one: engine and trainer round differently."""


@dataclass(kw_only=True)
class Sums:
    """Over response tokens of this rank."""

    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    gap: float = 0.0
    gap_tokens: float = 0.0
    gap_apart: float = 0.0
    tokens: float = 0.0
    weight: float = 0.0
    weight_squared: float = 0.0
    weighed: float = 0.0
    cut: float = 0.0
    scored: float = 0.0
    unpicked: float = 0.0
    mtp_loss: float = 0.0
    mtp_tokens: float = 0.0
    gap_max: float = 0.0

    def add(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            old, new = getattr(self, name), float(value)
            setattr(self, name, _larger(old, new) if name == "gap_max" else old + new)


def reduce_over_ranks(parts: list[Sums], extra: float, device: torch.device) -> tuple[Sums, float]:
    """Return (sums over ranks and updates, rank 0's `extra`), the same bits everywhere. Collective."""
    names = [field.name for field in fields(Sums)]
    counts = parallel_state.get_tensor_model_parallel_rank() == 0  # the others repeat its tokens
    rows = [[getattr(part, name) if counts else 0.0 for name in names] for part in parts]
    local = torch.tensor([*[value for row in rows for value in row], extra], dtype=torch.float64, device=device)
    gathered = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, local)
    extra = float(gathered[0][-1])
    table = torch.stack(gathered).cpu()[:, :-1].reshape(-1, len(names))
    total = dict(zip(names, table.sum(dim=0).tolist(), strict=True))
    return Sums(**total | {"gap_max": float(table[:, names.index("gap_max")].max())}), extra


def sum_over_context(values_S: Tensor) -> Tensor:
    """Return the sum over ranks with parts of the same sequences."""
    if parallel_state.get_context_parallel_world_size() > 1:
        dist.all_reduce(values_S, group=parallel_state.get_context_parallel_group())
    return values_S


def response_logprobs(batch: MicroBatch, logits_1TV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities, entropies), (R) each."""
    logits_RV = logits_1TV[0].index_select(0, batch.rows_R)
    group = parallel_state.get_tensor_model_parallel_group()
    return vocab_parallel_logprobs(logits_RV, batch.targets_R, temperature=temperature, group=group)


@torch.no_grad()
def compare_with_noise(
    batch: MicroBatch, seeds_R: Tensor, logits_1TV: Tensor, temperature: float, group: dist.ProcessGroup | None
) -> Tensor:
    """Return by how many nats another token scores more than each seeded one: beyond rounding, not what the engine
    sampled."""
    seeded_S = (seeds_R >= 0).nonzero()[:, 0]
    apart = [torch.zeros(0, dtype=torch.float64)]
    for part_C in torch.split(seeded_S, 1024):  # so many rows of logits are copied at once
        here_C = part_C.to(logits_1TV.device)
        rows_C, targets_C = batch.rows_R[here_C], batch.targets_R[here_C]
        logits_CV = logits_1TV[0].index_select(0, rows_C)
        own_C, _ = vocab_parallel_logprobs(logits_CV, targets_C, temperature=temperature, group=group)
        # Among the likeliest 16 is nearly always the one that the noise picks.
        ids_CK, logprobs_CK = vocab_parallel_top_k(logits_CV, 16, temperature=temperature, group=group)
        # SGLang's key is the position of the token that the pass was given, and so that of the row.
        positions_C = batch.positions_1T[0, rows_C].cpu()
        noise_CK = noise_of(seeds_R[part_C], positions_C, torch.cat([targets_C[:, None], ids_CK], dim=1).cpu())
        scores_CK = noise_CK + torch.cat([own_C[:, None], logprobs_CK], dim=1).cpu()
        apart.append(scores_CK[:, 1:].amax(dim=1) - scores_CK[:, 0])
    return torch.cat(apart)


@dataclass(frozen=True)
class PolicyObjective:
    """The reinforcement-learning loss: (micro-batch, logits) -> (loss, named sums)."""

    algorithm: AlgorithmConfig
    temperature: float
    max_gap: float = math.inf
    """Tokens with a larger |trainer - engine| are counted."""
    slack: float = SLACK["float32"]

    def __call__(self, batch: MicroBatch, logits_1TV: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        algorithm = self.algorithm
        logprobs_R, entropy_R = response_logprobs(batch, logits_1TV, self.temperature)
        old_R = logprobs_R.detach() if batch.old_R is None else batch.old_R
        if ":" in algorithm.loss:
            loss_R = loss_by(algorithm.loss, logprobs_R, old_R.detach(), batch.advantages_R)
            clipped_R = torch.zeros_like(loss_R, dtype=torch.bool)
        else:
            loss_R, clipped_R = policy_loss_T(
                logprobs_R,
                old_R,
                batch.advantages_R,
                kind=cast("LossKind", algorithm.loss),
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
                sequence_T=batch.sequence_R,
                num_sequences=batch.num_sequences,
                sum_over_context=sum_over_context,
            )
        sums = {"entropy": entropy_R.sum(), "clipped": clipped_R.sum(), "tokens": torch.tensor(len(loss_R))}
        if batch.seeds_R is not None:
            group = parallel_state.get_tensor_model_parallel_group()
            apart_S = compare_with_noise(batch, batch.seeds_R, logits_1TV, self.temperature, group)
            sums |= {"scored": torch.tensor(len(apart_S)), "unpicked": (apart_S > self.slack).sum()}
        if batch.rollout_R is not None:
            gap_R, compared = (old_R - batch.rollout_R).abs(), torch.tensor(len(old_R))
            if batch.stale_R is not None:  # of another policy: there is nothing to agree on
                gap_R, compared = gap_R.masked_fill(batch.stale_R != 0, 0.0), (batch.stale_R == 0).sum()
            if len(gap_R):
                sums |= {"gap": gap_R.sum(), "gap_max": gap_R.max(), "gap_tokens": compared}
                sums["gap_apart"] = (~(gap_R <= self.max_gap)).sum()  # nan is no agreement either
            weights_R, weighed = self._correction(batch, old_R, batch.rollout_R)
            loss_R = loss_R * weights_R
            sums |= weighed
        if batch.ref_R is not None and algorithm.kl_coef:
            penalty_R = kl_T(logprobs_R, batch.ref_R)
            loss_R = loss_R + algorithm.kl_coef * penalty_R
            sums["kl"] = penalty_R.detach().sum()
        loss = (loss_R * batch.weights_R).sum()
        return loss, sums | {"loss": loss.detach()}

    def _correction(self, batch: MicroBatch, old_R: Tensor, rollout_R: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (weights, their sums). Collective."""
        correction = self.algorithm.correction
        if correction.level == "off":
            return torch.ones_like(old_R), {}
        weights_R, cut_R = correction_weights_T(
            old_R,
            rollout_R,
            level=correction.level,
            action=correction.action,
            bounds=correction.bounds,
            sequence_T=batch.sequence_R,
            num_sequences=batch.num_sequences,
            sum_over_context=sum_over_context,
        )
        return weights_R, {
            "weight": weights_R.sum(),
            "weight_squared": weights_R.square().sum(),
            "weighed": torch.tensor(len(weights_R)),
            "cut": cut_R.sum(),
        }


def _larger(a: float, b: float) -> float:
    return a if math.isnan(a) or a > b else b


def cross_entropy(batch: MicroBatch, logits_1TV: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss, sums) of a supervised micro-batch: -sum of weight * log-probability at temperature 1."""
    logprobs_R, _ = response_logprobs(batch, logits_1TV, 1.0)
    loss = -(logprobs_R * batch.weights_R).sum()
    return loss, {"loss": loss.detach()}
