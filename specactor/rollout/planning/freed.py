"""What a drafter on a device that has nothing else to do brings an engine that has. PURE: numbers in, numbers out.

Invariants: the window is the one of the highest predicted speed; waking is charged: until it is over the requests go on
as they do now, so a drafter that wakes too late brings nothing, and none is predicted to slow anybody down by it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specactor.errors import PlanError
from specactor.rollout.planning.reconfiguration import LiveCosts, speeds
from specactor.rollout.planning.rounds import survival_of


def best_window(rate: float, costs: LiveCosts) -> int:
    """Of a drafter elsewhere, where each draft token is accepted with probability `rate`."""
    return int(_by_window(rate, costs).argmax()) + 1


def gain(rate: float, costs: LiveCosts) -> float:
    """Speed with that drafter and window, over that of plain decoding; 1 at least, since drafts may be ignored."""
    return max(1.0, float(_by_window(rate, costs).max()) * costs.plain_s)


def gain_after(waking: float, left: float, faster: float) -> float:
    """Speed of a request that has `left` tokens to go, over that without the drafter, which is there after `waking`
    tokens of it; from then on the request is `faster` times as fast."""
    if waking < 0 or left <= 0 or faster < 1:
        raise PlanError(
            f"gain_after: got waking {waking}, left {left}, faster {faster}; expected >= 0, > 0 and >= 1 times."
        )
    before = min(waking, left)
    return left / (before + (left - before) / faster)


def _by_window(rate: float, costs: LiveCosts) -> NDArray[np.float64]:
    survival_1W = np.array([survival_of(rate, len(costs.verify_s) - 1)])
    by_window: NDArray[np.float64] = speeds(survival_1W, costs, "decoupled")[0]
    return by_window
