"""Advantages of the responses of one RL step. PURE.

Invariants: adding a constant to a group's rewards changes none of its advantages; they sum to zero; permuting a group
permutes them exactly; a group of equal rewards gets exact zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, assert_never

from specactor.errors import DataError

AdvantageKind = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"]

STD_EPS = 1e-6
"""Added to a standard deviation before dividing by it."""


def group_advantages(rewards_by_group: Sequence[Sequence[float]], kind: AdvantageKind) -> list[list[float]]:
    """Return every response's advantage; r are a group's rewards, m their mean, std that of a sample.

    - grpo: (r - m) / (std(r) + eps), arXiv 2402.03300 section 4.1.2.
    - dr_grpo: r - m, arXiv 2503.20783.
    - rloo: r - mean of the *other* rewards = n/(n-1) (r - m), arXiv 2402.14740.
    - reinforce_pp: (r - m) / (std of r - m over the step + eps), arXiv 2501.03262 with a group baseline.

    Raises DataError for a group of one.
    """
    for g, rewards in enumerate(rewards_by_group):
        _check_group(g, rewards)
    centred = [_centred(rewards) for rewards in rewards_by_group]
    match kind:
        case "grpo":
            return [_scaled(group, _std(group)) for group in centred]
        case "dr_grpo":
            return centred
        case "rloo":
            return [[a * (len(group) / (len(group) - 1)) for a in group] for group in centred]
        case "reinforce_pp":
            spread = _std([a for group in centred for a in group]) if centred else 0.0
            return [_scaled(group, spread) for group in centred]
        case _:
            assert_never(kind)


def informative(rewards: Sequence[float]) -> bool:
    """Return whether rewards differ (dynamic sampling, arXiv 2503.14476 eq. 11)."""
    return any(r != rewards[0] for r in rewards)


def shape_overlong(reward: float, length: int, max_new_tokens: int, buffer: int) -> float:
    """Return the reward less DAPO's overlong punishment, arXiv 2503.14476 eq. 13: over the last `buffer` tokens before
    `max_new_tokens` it rises linearly from 0 to 1. A `buffer` of 0: none."""
    if buffer == 0:
        return reward
    over = length - (max_new_tokens - buffer)
    return reward - min(max(over / buffer, 0.0), 1.0)


def _check_group(index: int, rewards: Sequence[float]) -> None:
    if len(rewards) < 2:
        raise DataError(
            f"group {index}: got {len(rewards)} responses, expected >= 2. "
            "Advantages compare the responses of a group: raise rollout.group_size, or leave the group out."
        )


def _centred(rewards: Sequence[float]) -> list[float]:
    if not informative(rewards):
        return [0.0] * len(rewards)  # r - m may miss zero by a rounding error, which a small std would magnify
    mean = math.fsum(rewards) / len(rewards)  # fsum: the same value in any order
    return [r - mean for r in rewards]


def _std(centred: Sequence[float]) -> float:
    return math.sqrt(math.fsum(a * a for a in centred) / (len(centred) - 1))  # n - 1: as TRL and verl


def _scaled(centred: Sequence[float], std: float) -> list[float]:
    return [a / (std + STD_EPS) for a in centred]
