"""Chooses draft windows, and the drafter, by predicted speed. PURE.

Invariants: no windows are predicted faster, if draft_s does not fall with depth; under one depth the fewest rows among
equals are chosen, of small j first, then of small i; higher survivals never lower that speed.

Shape legend: B requests, W max_window, N rows beyond each request's first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat

import numpy as np
from numpy.typing import NDArray

from specactor.rollout.speculation.verification import Drafts

OFF = "off"
CHANGE_MARGIN = 0.02  # share by which another drafter must be faster than the current one


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a round may verify, and what that is predicted to bring."""

    windows: tuple[int, ...]  # draft tokens to verify of each request; 0: a plain step
    emitted: float  # tokens of all requests together
    round_s: float
    factor: float = 1.0  # measured over predicted seconds of such rounds, by which `round_s` was corrected
    reading_s: float = 0.0  # of `round_s`, what its drafter reads of new texts, where they come all the time
    usual: float = 0.0
    """Tokens per second of such rounds on average, where drafts that are missing come in the next round."""
    verified: Callable[[Sequence[int]], Drafts] | None = None
    """Windows -> what is verified; None: drafts of the drafter that the option is named after."""
    drafter: str = ""  # as `choose` names it; OFF for plain decoding
    reason: str = ""  # for logs: "off: 512 tok/s; suffix 498"

    @property
    def tokens_per_s(self) -> float:
        return self.emitted / self.round_s

    @property
    def speed(self) -> float:
        """Predicted tokens per second: of this round or as usual, whichever is more."""
        return max(self.tokens_per_s, self.usual)

    @property
    def predicted_s(self) -> float:
        """Return the seconds of a round without reading, uncorrected."""
        return (self.round_s - self.reading_s) / self.factor

    def corrected(self, factor: float, reading_s: float = 0.0) -> Choice:
        return replace(self, round_s=self.round_s * factor + reading_s, factor=factor, reading_s=reading_s)


def padded(survivals: Sequence[Sequence[float]], max_window: int) -> tuple[NDArray[np.float64], list[int]]:
    """Return (survivals [B][W], lengths) for `best_windows`."""
    lengths = [min(len(s), max_window) for s in survivals]
    survival_BW = np.zeros((len(survivals), max_window))
    is_there_BW = np.arange(max_window) < np.array(lengths)[:, None]
    survival_BW[is_there_BW] = [*chain.from_iterable(s[:max_window] for s in survivals)]
    return survival_BW, lengths


def best_windows(
    survival_BW: NDArray[np.float64],
    lengths: Sequence[int],
    *,
    verify_N1: NDArray[np.float64],
    draft_s: Callable[[int], float],
    drafted: Sequence[bool] = (),
) -> Choice:
    """Return the windows w of highest predicted speed: sum_i (1 + sum_{j <= w_i} s_ij) tokens in verify_s(B, sum_i (1 +
    w_i)) + draft_s(max_i w_i) seconds.

    Args:
        survival_BW: s_ij = P(the first j draft tokens of request i are accepted).
        lengths: bounds of the windows.
        verify_N1: verify_s with 0, 1, .. rows; more are not looked at.
        drafted: requests whose drafts are there and cost nothing.
    """
    assert lengths
    num_requests = len(lengths)
    survival_N, row_N = _rows_in_order(survival_BW, lengths)
    num_rows = len(row_N)
    depth_N = row_N // num_requests  # to which each row must be drafted, from 0; -1: its draft is there
    if any(drafted):
        depth_N = np.where(np.array(drafted)[row_N % num_requests], -1, depth_N)
    verify_N1 = verify_N1[: num_rows + 1]
    assert verify_N1.min() > 0, verify_N1
    prices = _rising(draft_s, int(depth_N.max()) + 1 if num_rows else 0)
    best_count, best_cap = 0, 0
    best_speed = num_requests / (float(verify_N1[0]) + prices[0])
    # A depth at the price of the next is left out: that has all these rows and more.
    caps = [cap for cap in range(len(prices)) if cap + 1 == len(prices) or prices[cap + 1] > prices[cap]]
    for cap in caps:
        # All numbers of rows, since costs jump, and what is beyond the jump can pay for it.
        within_N = survival_N if cap + 1 == len(prices) else survival_N[depth_N < cap]
        if not len(within_N):
            continue
        speed_N = within_N.cumsum()
        speed_N += num_requests
        speed_N /= verify_N1[1 : len(within_N) + 1] + prices[cap]
        top = int(speed_N.argmax())
        if speed_N[top] > best_speed:
            best_count, best_cap, best_speed = top + 1, cap, float(speed_N[top])
    chosen_N = (depth_N < best_cap).nonzero()[0][:best_count]
    windows = np.bincount(row_N[chosen_N] % num_requests, minlength=num_requests).tolist()
    return Choice(
        windows=tuple(windows),
        emitted=num_requests + float(survival_N[chosen_N].sum()),
        round_s=float(verify_N1[best_count]) + prices[best_cap],
    )


def whole_drafts(
    survival_BW: NDArray[np.float64],
    lengths: Sequence[int],
    *,
    verify_N1: NDArray[np.float64],
    draft_s: Callable[[int], float],
    drafted: Sequence[bool] = (),
) -> Choice:
    """Return windows of all that was drafted; see `best_windows`."""
    depth = max(0 if there else length for length, there in zip(lengths, drafted or repeat(False), strict=False))
    survival_N, _ = _rows_in_order(survival_BW, lengths)
    return Choice(
        windows=tuple(lengths),
        emitted=len(lengths) + float(survival_N.sum()),
        round_s=float(verify_N1[sum(lengths)]) + draft_s(depth),
    )


def choose(
    options: Mapping[str, Choice], *, requests: int, plain_s: float, current: str = OFF, margin: float = CHANGE_MARGIN
) -> Choice:
    """Return the fastest of the options and plain decoding, with corrected seconds. Another drafter than `current` must
    be faster by `margin`; plain decoding need not, and wins among equals, then the first name. What counts as fast as
    `usual` may have windows of 0."""
    assert requests >= 1, requests
    assert plain_s > 0, plain_s
    assert margin >= 0, margin
    assert OFF not in options, "which is plain decoding"
    found = {OFF: Choice(windows=(0,) * requests, emitted=float(requests), round_s=plain_s)}
    found |= {name: options[name] for name in sorted(options)}
    assert all(len(choice.windows) == requests for choice in found.values()), (requests, found)
    speeds = {name: choice.speed for name, choice in found.items()}
    ranked = sorted(speeds, key=lambda name: -speeds[name])  # stable: off first among equals, then by name
    picked = ranked[0]
    if picked != OFF and current in speeds and speeds[picked] <= speeds[current] * (1 + margin):
        picked = current
    others = "".join(f"; {name} {speeds[name]:.0f}" for name in ranked if name != picked)
    return replace(found[picked], drafter=picked, reason=f"{picked}: {speeds[picked]:.0f} tok/s{others}")


def _rows_in_order(
    survival_BW: NDArray[np.float64], lengths: Sequence[int]
) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
    """Return (survival, row) of all rows, best first; row = (j - 1) * B + i."""
    num_requests, max_window = survival_BW.shape
    num_rows = sum(lengths)
    survival_WB = survival_BW.T
    if num_rows < num_requests * max_window:
        survival_WB = np.where(np.arange(max_window)[:, None] < np.array(lengths), survival_WB, -1.0)
    assert (survival_WB[1:] <= survival_WB[:-1]).all(), survival_BW  # or NaN
    by_depth = survival_WB.ravel()  # rows of equal survival then keep the order of j, and windows are prefixes
    row_N = (-by_depth).argsort(kind="stable")[:num_rows]
    survival_N = by_depth[row_N]
    assert not num_rows or (survival_N[0] <= 1.0 and survival_N[-1] >= 0.0), survival_N
    return survival_N, row_N


def _rising(draft_s: Callable[[int], float], depth: int) -> list[float]:
    """Return seconds for depth 0 .. depth, never falling."""
    prices: list[float] = []
    for d in range(depth + 1):
        seconds = draft_s(d)
        assert seconds >= 0, (d, seconds)
        prices.append(max(seconds, prices[-1]) if prices else seconds)
    return prices
