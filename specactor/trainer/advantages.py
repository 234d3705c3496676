"""Advantages of the responses of one RL step, and what is done to rewards before. PURE: floats in, floats out.

Notation: one group = the n responses to one prompt, with rewards r_1..r_n; m = mean(r).
Standard deviations are sample ones (divisor n - 1), as in TRL and verl; the papers write ``std`` and leave it open.

Invariants: adding a constant to a group's rewards changes none of its advantages; a group's advantages sum to zero;
permuting a group permutes its advantages, exactly; a group of equal rewards gets exact zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, assert_never

from specactor.errors import DataError

AdvantageKind = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp"]

STD_EPS = 1e-6
"""Added to a standard deviation before dividing by it; far below the spread of any real reward."""


def group_advantages(rewards_by_group: Sequence[Sequence[float]], kind: AdvantageKind) -> list[list[float]]:
    """Advantage of every response, in the shape of `rewards_by_group`.

    - grpo: (r_i - m) / (std(r) + eps), arXiv 2402.03300 section 4.1.2.
    - dr_grpo: r_i - m, arXiv 2503.20783: without the division, which favours prompts of little spread.
    - rloo: r_i - mean of the *other* rewards of the group, arXiv 2402.14740; equals n/(n-1) (r_i - m).
    - reinforce_pp: a_i = r_i - m, then a_i / (std over all responses of the step + eps), arXiv 2501.03262, the variant
      with a group baseline. Every response counts once in that std (not once per token), and the mean over the
      step needs no subtraction, because every group's is already zero.

    Raises DataError for a group of fewer than two responses, or a reward that is not finite.
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
    """Return whether a group teaches anything: its rewards are not all equal (dynamic sampling, arXiv 2503.14476 eq.
    11)."""
    return any(r != rewards[0] for r in rewards)


def shape_overlong(reward: float, length: int, max_new_tokens: int, buffer: int) -> float:
    """The reward after DAPO's soft overlong punishment, arXiv 2503.14476 eq. 13.

    Nothing is lost up to ``max_new_tokens - buffer`` tokens, then linearly more, and 1 from `max_new_tokens` on.
    ``buffer = 0`` switches it off.
    """
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
    for i, r in enumerate(rewards):
        if not math.isfinite(r):
            raise DataError(
                f"group {index}, response {i}: got reward {r}, expected a finite number. Correct its verifier."
            )


def _centred(rewards: Sequence[float]) -> list[float]:
    if not informative(rewards):
        return [0.0] * len(rewards)  # r - m may miss zero by a rounding error, which a small std would magnify
    mean = math.fsum(rewards) / len(rewards)  # fsum: the same value in any order
    return [r - mean for r in rewards]


def _std(centred: Sequence[float]) -> float:
    """Sample standard deviation of values whose mean is zero."""
    return math.sqrt(math.fsum(a * a for a in centred) / (len(centred) - 1))


def _scaled(centred: Sequence[float], std: float) -> list[float]:
    return [a / (std + STD_EPS) for a in centred]
