"""What tokens weigh that were sampled with other probabilities than the trainer's, as a pure function of tensors.

Engines round otherwise than the trainer, and a response in parts has tokens of older policies. The loss of a token is
multiplied by a weight made of the ratio exp(trainer - sampled), where *sampled* is the log-probability under the very
policy that the token was drawn from, and *trainer* is that of the policy before the update.

Shapes: T packed response tokens of one micro-batch on this rank, S sequences of the micro-batch.
"""
# ruff: noqa: N802 (names of functions end in the shape that they return)

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, assert_never

import torch
from torch import Tensor

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

    Levels: a token has its own ratio; the product of those of its response (sequence: unbiased, of a variance that
    grows with length); their geometric mean. Actions:

    - truncate: the ratio within [low, high]. With level token and low = 0 it is truncated importance sampling, min(r,
      high): Ionides, 2008; Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025.
    - mask: the ratio, and 0 outside of the bounds. With level token it is IcePop (Ling team, "Every step evolves",
      arXiv 2510.18855): what engine and trainer disagree on most teaches nothing.
    - reject: 1, and 0 for all tokens of a response in which any ratio is outside: what is left is not reweighted.

    What is cut stays in the denominators of `losses.token_weights`, which do not depend on the policy.

    Args:
        sequence_T, num_sequences, sum_over_context: as of `losses.policy_loss_T`.
    """
    log_ratio_T = trainer_logprobs_T.detach() - sampled_logprobs_T.detach()
    zeros_S = log_ratio_T.new_zeros(num_sequences)

    def sum_S(values_T: Tensor) -> Tensor:
        return sum_over_context(zeros_S.index_add(0, sequence_T, values_T))

    match level:
        case "token":
            ratio_T = log_ratio_T.exp()
        case "sequence":
            ratio_T = sum_S(log_ratio_T).exp()[sequence_T]
        case "geometric":
            ratio_T = (sum_S(log_ratio_T) / sum_S(torch.ones_like(log_ratio_T))).exp()[sequence_T]
        case _:
            assert_never(level)
    low, high = bounds
    outside_T = (ratio_T < low) | (ratio_T > high)
    match action:
        case "truncate":
            return ratio_T.clamp(low, high), outside_T
        case "mask":
            return ratio_T.masked_fill(outside_T, 0.0), outside_T
        case "reject":
            rejected_T = sum_S(outside_T.to(ratio_T.dtype))[sequence_T] > 0
            return (~rejected_T).to(ratio_T.dtype), rejected_T
        case _:
            assert_never(action)
