"""Losses of policy and critic per token, and weights that correct for how tokens were sampled. PURE. An update's loss
is the sum over its tokens, on all ranks, of ``weight * loss``.

Shapes: T response tokens of a micro-batch on this rank, S sequences. Log-probabilities are natural, at the sampling
temperature.
"""
# ruff: noqa: N802 (names of functions end in the shape that they return)

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal, assert_never

import torch
from torch import Tensor

from specactor.errors import DataError
from specactor.trainer.advantages import STD_EPS

LossKind = Literal["ppo_clip", "gspo", "cispo"]
Aggregation = Literal["sequence_mean", "token_mean", "fixed_length"]


def policy_loss_T(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    kind: LossKind,
    clip_low: float,
    clip_high: float,
    sequence_T: Tensor,
    num_sequences: int,
    sum_over_context: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return (loss of every token; whether clipping exp(logprob - old) to [1 - clip_low, 1 + clip_high] changed its
    gradient). The last three arguments are gspo's.

    Args:
        old_logprobs_T: of the policy that sampled, by the trainer.
        sequence_T: int64, numbered alike on a context-parallel group.
        sum_over_context: sums (S) over that group, in place or not; every rank calls it equally often, also with T = 0.
    """
    old_logprobs_T, advantages_T = old_logprobs_T.detach(), advantages_T.detach()
    log_ratio_T = logprobs_T - old_logprobs_T
    match kind:
        case "ppo_clip":  # arXiv 1707.06347 eq. 7; DAPO's (arXiv 2503.14476) with clip_high > clip_low
            return _pessimistic(_ratio(log_ratio_T), advantages_T, clip_low, clip_high)
        # arXiv 2507.18071 eq. 13-14, with clip ranges of 3e-4 to 4e-4. With aggregation = sequence_mean its gradient is
        # that of the objective with one ratio per sequence.
        case "gspo":
            mean_S = _sequence_mean_S(log_ratio_T.detach(), sequence_T, num_sequences, sum_over_context)
            own_T = logprobs_T - logprobs_T.detach()  # zero, with the gradient of logprobs
            return _pessimistic(_ratio(mean_S)[sequence_T] * own_T.exp(), advantages_T, clip_low, clip_high)
        case "cispo":  # arXiv 2506.13585 eq. 4, which has no lower bound: bring clip_low near 1
            ratio_T = _ratio(log_ratio_T.detach())
            weight_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
            return -weight_T * advantages_T * logprobs_T, (weight_T != ratio_T) & (advantages_T != 0)
        case _:
            assert_never(kind)


def token_weights(
    lengths: Sequence[int], aggregation: Aggregation, max_new_tokens: int, *, is_branch: Sequence[bool] = ()
) -> list[float]:
    """Return the weight of a token, per sequence, from the lengths of the *whole* update. Of S responses, empty ones
    included: sequence_mean 1 / (S len), or 0; token_mean 1 / (all tokens); fixed_length 1 / (S max_new_tokens). A
    branch is a part of the response before it, with which it shares the reward (default: none is). Raises DataError for
    no token at all, or a negative length."""
    total = sum(lengths)
    if total == 0 or min(lengths) < 0:
        raise DataError(
            f"response lengths: got {list(lengths)[:8]} in {len(lengths)} sequences, expected lengths >= 0 and "
            "at least one token. Leave out an update that has nothing to learn from."
        )
    response = list(accumulate(not part for part in is_branch)) if is_branch else range(1, 1 + len(lengths))
    num_responses, tokens = response[-1], Counter[int]()
    for i, length in zip(response, lengths, strict=True):
        tokens[i] += length
    match aggregation:
        case "sequence_mean":  # GRPO
            return [1 / (num_responses * tokens[i]) if tokens[i] else 0.0 for i in response]
        case "token_mean":  # DAPO
            return [1 / total] * len(lengths)
        case "fixed_length":  # Dr.GRPO
            return [1 / (num_responses * max_new_tokens)] * len(lengths)
        case _:
            assert_never(aggregation)


def kl_T(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """Estimate KL(policy || reference) from every sampled token: k3, unbiased and never negative (J. Schulman,
    "Approximating KL Divergence", 2020; arXiv 2402.03300 eq. 4). Its gradient estimates that of KL(reference ||
    policy)."""
    d_T = _bounded(ref_logprobs_T.detach() - logprobs_T)
    return torch.expm1(d_T) - d_T


def gae(
    values: Sequence[Tensor], rewards: Sequence[float], *, gamma: float, decay: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Return (advantages, returns) of the tokens of every response, float64: generalised advantage estimation, arXiv
    1506.02438 eq. 16, with lambda as `decay`. The last token earns the reward. `values` are expected before each token;
    returns are advantage + value."""
    longest = max(map(len, values), default=0)
    values_ST = torch.zeros(len(values), longest + 1, dtype=torch.float64)  # responses end in the last column but one
    for row_T, own_T in zip(values_ST, values, strict=True):
        row_T[longest - len(own_T) : longest] = own_T
    delta_ST = gamma * values_ST[:, 1:] - values_ST[:, :-1]
    if longest:
        delta_ST[:, -1] += torch.tensor(rewards, dtype=torch.float64)
    running_S = torch.zeros(len(values), dtype=torch.float64)
    for t in reversed(range(longest)):
        running_S = delta_ST[:, t] + gamma * decay * running_S
        delta_ST[:, t] = running_S
    advantages = [row_T[longest - len(own_T) :] for row_T, own_T in zip(delta_ST, values, strict=True)]
    return advantages, [a_T + own_T for a_T, own_T in zip(advantages, values, strict=True)]


def gae_of_turns(
    values: Sequence[Tensor], rewards: Sequence[float], *, turns: Sequence[Tensor], gamma: float, decay: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Return (advantages, returns) as `gae`, where a step is a whole turn (turn-PPO, arXiv 2512.17008): it has its
    first token's value, and its tokens its advantage and return. One turn alone has the reward less its value, whatever
    gamma and lambda. `turns` number each token's, from 0 on."""
    lengths = [torch.bincount(turns_T) for turns_T in turns]
    firsts = [own_T[of_K.cumsum(0) - of_K] for own_T, of_K in zip(values, lengths, strict=True)]
    advantages, returns = (
        [of_K[turns_T] for of_K, turns_T in zip(found, turns, strict=True)]
        for found in gae(firsts, rewards, gamma=gamma, decay=decay)
    )
    return advantages, returns


def turn_numbers(mask_T: Tensor) -> Tensor:
    """Return each sampled token's turn, from 0 on; other tokens end one."""
    before_T = torch.cat([mask_T.new_zeros(1), mask_T[:-1]])
    return ((mask_T & ~before_T).cumsum(0) - 1)[mask_T]


def whitened(advantages: Sequence[Tensor]) -> list[Tensor]:
    """Standardise the advantages over all tokens of all responses."""
    flat_T = torch.cat([*advantages])
    scale = flat_T.std(correction=0) + STD_EPS
    return [(a_T - flat_T.mean()) / scale for a_T in advantages]


def value_loss_T(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return (half the squared error of every value; whether clipping stopped its gradient). With `clip` it is at least
    that of the values within old +- clip (arXiv 1707.06347's implementation): the gradient stops where a value has
    moved that far *towards* its return."""
    loss_T = (values_T - returns_T).square() / 2
    if clip is None:
        return loss_T, torch.zeros_like(loss_T, dtype=torch.bool)
    moved_T = (values_T - old_values_T).detach()
    held_loss_T = (old_values_T + moved_T.clamp(-clip, clip) - returns_T).square() / 2
    clipped_T = (moved_T.abs() > clip) & (held_loss_T > loss_T)  # within the range rounding alone makes them differ
    return torch.where(clipped_T, held_loss_T, loss_T), clipped_T


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-20.0, 20.0)  # of which exp is finite in float32


def _ratio(log_ratio: Tensor) -> Tensor:
    return _bounded(log_ratio).exp()


def _pessimistic(ratio_T: Tensor, advantages_T: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    low, high = 1 - clip_low, 1 + clip_high
    # max(-A r, -A clip(r)): the bound holds only where passing it would *lower* the loss
    clipped_T = ((advantages_T > 0) & (ratio_T > high)) | ((advantages_T < 0) & (ratio_T < low))
    return -advantages_T * torch.where(clipped_T, ratio_T.detach().clamp(low, high), ratio_T), clipped_T


def _sequence_mean_S(
    values_T: Tensor, sequence_T: Tensor, num_sequences: int, sum_over_context: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the mean of each sequence's tokens, on all ranks; nan without any."""
    zeros_S = values_T.new_zeros(num_sequences)
    sum_S = sum_over_context(zeros_S.index_add(0, sequence_T, values_T))
    count_S = sum_over_context(zeros_S.index_add(0, sequence_T, torch.ones_like(values_T)))
    return sum_S / count_S


Level = Literal["token", "sequence", "geometric"]
Action = Literal["truncate", "mask", "reject"]


def correction_weights_T(
    trainer_logprobs_T: Tensor,
    sampled_logprobs_T: Tensor,
    *,
    level: Level,
    action: Action,
    bounds: tuple[float, float],
    sequence_T: Tensor,
    num_sequences: int,
    sum_over_context: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return (weight of every token, without gradient; whether the bounds changed it).

    The ratio exp(trainer - sampled) is a token's own, the product over its response (unbiased, of a variance that grows
    with length), or their geometric mean, and within `bounds` the weight. Outside, truncate makes it the nearer bound,
    mask 0; reject makes weights 1, and 0 for a whole response with any ratio outside. What is cut stays in the
    denominators of `token_weights`. Other arguments: see `policy_loss_T`.
    """
    log_ratio_T = trainer_logprobs_T.detach() - sampled_logprobs_T.detach()
    zeros_S = log_ratio_T.new_zeros(num_sequences)

    def sum_S(values_T: Tensor) -> Tensor:
        return sum_over_context(zeros_S.index_add(0, sequence_T, values_T))

    ratios: dict[Level, Callable[[], Tensor]] = {
        "token": lambda: log_ratio_T.exp(),
        "sequence": lambda: sum_S(log_ratio_T).exp()[sequence_T],
        "geometric": lambda: (sum_S(log_ratio_T) / sum_S(torch.ones_like(log_ratio_T))).exp()[sequence_T],
    }
    ratio_T = ratios[level]()
    low, high = bounds
    outside_T = (ratio_T < low) | (ratio_T > high)
    match action:
        # With level token and low = 0 truncated importance sampling: Ionides, 2008; Yao et al., "Your efficient RL
        # framework secretly brings you off-policy RL training", 2025.
        case "truncate":
            return ratio_T.clamp(low, high), outside_T
        case "mask":  # with level token IcePop (Ling team, "Every step evolves", arXiv 2510.18855)
            return ratio_T.masked_fill(outside_T, 0.0), outside_T
        case "reject":  # all of a response in which any ratio is outside; what is left is not reweighted
            rejected_T = sum_S(outside_T.to(ratio_T.dtype))[sequence_T] > 0
            return (~rejected_T).to(ratio_T.dtype), rejected_T
        case _:
            assert_never(action)
