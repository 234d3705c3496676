"""Fastest-of-N: add the next draft method while its predicted gain exceeds the margin. PURE: estimates in, names out.

As in Algorithm 3 of 2511.16193 requests come by acceptance ascending, and methods by what they are predicted to buy
(`ranked`, the paper's draft ladder); here every further method must pay for the rows that it adds to the verify. A
request's drafts are verified in one tree, in which common beginnings are held once. A draft's *own* tokens, which no
earlier draft has, are accepted only where the target disagrees with all earlier drafts, so what they bring is estimated
from rounds in which it did.

Invariants: a request has each method at most once, and at most `most`; a method gets at most `room` requests; only
drafts that are there count; nothing is added whose predicted gain is `MARGIN` or less. A tree has at most
`max_window` draft tokens, and all trees at most as many branches as there is room for; a token's probability is at
most its parent's, and those of all that follow one token add up to at most its own.

Shape legend: B requests, W windows 1..max_window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from specactor.rollout.speculation.acceptance import survival_of
from specactor.rollout.speculation.reconfiguration import LiveCosts, Mode, speeds
from specactor.rollout.speculation.verification import Drafts, common, held
from specactor.rollout.speculation.windows import OFF

MARGIN = 0.02
"""By which a further method must be predicted to make a request faster; the paper adds them without one."""
MOST_REQUESTS = 16
"""That get further drafts in a round, at most: looking at a request's trees takes 0.1 ms. Those that accept least."""

Floats = NDArray[np.float64]


def speedup(rate: float, costs: LiveCosts) -> float:
    """Predicted speed over plain decoding, at the best mode and window of a method whose draft tokens are accepted with
    probability `rate` each; below 1 where plain decoding is faster."""
    modes: tuple[Mode, ...] = ("coupled", "decoupled")
    return max(float(_by_window(rate, costs, mode).max()) for mode in modes) * costs.plain_s


def ranked(rates: Mapping[str, float], costs: Mapping[str, LiveCosts]) -> list[str]:
    """Methods by their speed-up, the best first, by name among equals. Args: rates: P(a draft token is accepted | those
    before it were), by method; costs: of rounds if that method drafts, in every way that it can."""
    return sorted(rates, key=lambda name: (-speedup(rates[name], costs[name]), name))


def best_window(rate: float, costs: LiveCosts) -> int:
    return int(_by_window(rate, costs, "decoupled").argmax()) + 1


def gain_after(waking: float, left: float, faster: float) -> float:
    """Speed of a request that has `left` tokens to go, over that without a drafter that is there after `waking` tokens
    of it; from then on the request is `faster` times as fast. A drafter that wakes too late brings nothing."""
    assert waking >= 0, waking
    assert left > 0, left
    assert faster >= 1, faster
    before = min(waking, left)
    return left / (before + (left - before) / faster)


def _by_window(rate: float, costs: LiveCosts, mode: Mode) -> Floats:
    """Return tokens per second."""
    by_window_W: Floats = speeds(np.array([survival_of(rate, len(costs.verify_s) - 1)]), costs, mode)[0]
    return by_window_W


def combined(survival_MW: Floats, *, alike: float) -> Floats:
    """[W]: P(at least one method has its first j draft tokens accepted).

    `alike`: 0, methods agree with the target independently; 1, where the best fails all fail. In between it is linear,
    which is an assumption; measure it where trees of several drafters are verified.
    """
    assert 0 <= alike <= 1, alike
    best_W = survival_MW.max(axis=0)
    apart_W = 1.0 - np.prod(1.0 - survival_MW, axis=0)
    joined_W: Floats = best_W + (1.0 - alike) * (apart_W - best_W)
    return joined_W


def further(
    owners: Sequence[str],
    drafts: Drafts,
    own: Mapping[str, Floats],
    after: Mapping[str, Floats],
    *,
    ranked: Sequence[str],
    costs: LiveCosts,
    most: int,
    room: int,
) -> list[list[str]]:
    """Per request all its methods, its own first.

    Args:
        owners: whose draft each request has (OFF: none, and it gets none).
        drafts: all that are there.
        own: per method [B][W], survivals of its drafts, 0 behind their ends.
        after: the same where earlier drafts were wrong.
        ranked: methods, the best first.
        most: methods per request.
        room: requests that get a method, for each method.
    """
    methods = [[] if name == OFF else [name] for name in owners]
    if most < 2 or room < 1:
        return methods
    gains = Gains(owners, drafts, own, after, costs)
    promising_B = np.max([gains.bound[name] for name in ranked], axis=0) > 1.0 + MARGIN
    neediest = sorted(promising_B.nonzero()[0].tolist(), key=lambda i: float(own[owners[i]][i, 0]))[:MOST_REQUESTS]
    left = dict.fromkeys(ranked, room)
    for i in neediest:
        for name in ranked:
            if name in methods[i] or not drafts[name][i] or not left[name] or len(methods[i]) == most:
                continue
            if gains.of(i, methods[i], name) > 1.0 + MARGIN:
                methods[i].append(name)
                left[name] -= 1
    return methods


class Gains:
    """Predicted speed with a further method over that without, if all requests did the same."""

    def __init__(
        self,
        owners: Sequence[str],
        drafts: Drafts,
        own: Mapping[str, Floats],
        after: Mapping[str, Floats],
        costs: LiveCosts,
    ) -> None:
        assert costs.coupled_draft_s is not None
        self._owners, self._drafts, self._own, self._after = owners, drafts, own, after
        self._seconds = np.concatenate([costs.verify_s[:1], costs.verify_s[1:] + costs.coupled_draft_s])
        """[W + 1]: of rounds with so many draft tokens of each request."""
        self.bound = {name: self._bounds(name) for name in own}
        """Per method [B]; as if its draft began wherever the request's own one ends or is wrong."""
        self._speeds: dict[tuple[object, ...], float] = {}

    def of(self, i: int, methods: Sequence[str], further: str) -> float:
        """Of one more method for request i, which has these, its own first."""
        if self.bound[further][i] <= 1.0 + MARGIN:
            return 1.0
        there = (methods[0], *sorted(methods[1:]))
        return self._of_trees(i, (*there, further)) / self._of_trees(i, there)

    def _bounds(self, method: str) -> Floats:
        """1 for requests whose own draft is that method's, or that have none."""
        bound_B = np.ones(len(self._owners))
        for name in self._own:
            rows = [i for i, owner in enumerate(self._owners) if owner == name != method]
            if not rows:
                continue
            own_BW = self._own[name][rows]
            ends_B = np.array([len(self._drafts[name][i]) - 1 for i in rows])
            left_B = 1.0 - own_BW[np.arange(len(rows)), ends_B]
            more_BW = np.concatenate([own_BW, left_B[:, None] * self._after[method][rows]], axis=1)
            bound_B[rows] = self._best(more_BW) / self._best(own_BW)
        return bound_B

    def _best(self, chances_BN: Floats) -> Floats:
        """[B]: speed of rounds that verify the likeliest tokens, as many as are best. Chances fall along a draft, so
        the likeliest are the beginnings of drafts."""
        falling_BW = -np.sort(-chances_BN, axis=1)[:, : len(self._seconds) - 1]
        tokens_BW = 1.0 + np.cumsum(np.pad(falling_BW, ((0, 0), (1, 0))), axis=1)
        best_B: Floats = (tokens_BW / self._seconds[: tokens_BW.shape[1]]).max(axis=1)
        return best_B

    def _of_trees(self, i: int, methods: tuple[str, ...]) -> float:
        speed = self._speeds.get((i, methods))
        if speed is None:
            drafts = [self._drafts[name][i] for name in methods]
            alone, after = ([table[name][i].tolist() for name in methods] for table in (self._own, self._after))
            speed = self._speeds[i, methods] = float(
                self._best(np.concatenate(survivals(drafts, alone, after))[None])[0]
            )
        return speed


def fitted(drafts: Mapping[str, Sequence[Sequence[int]]], *, max_tokens: int, max_branches: int) -> Drafts:
    """The drafts, as far as the requests' trees can hold them. Drafters without any are left out."""
    names = [name for name, lists in drafts.items() if any(lists)]
    of_requests = list(zip(*(drafts[name] for name in names), strict=True))
    if max_branches >= (len(names) - 1) * len(of_requests) and all(
        sum(map(len, of_request)) <= max_tokens for of_request in of_requests
    ):
        return {name: [list(draft) for draft in drafts[name]] for name in names}
    out: Drafts = {name: [] for name in names}
    for of_request in of_requests:
        lengths, branches = held(of_request, max_tokens=max_tokens, max_branches=max_branches)
        max_branches -= branches
        for name, draft, length in zip(names, of_request, lengths, strict=True):
            out[name].append(list(draft[:length]))
    return out


def survivals(
    drafts: Sequence[Sequence[int]], alone: Sequence[Sequence[float]], after: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Per draft of one request, P(accepted) of each of its own tokens.

    Args: alone[k][j], P(the first j + 1 tokens of draft k are accepted); after[k][j], P(the first j + 1 of its own are
    accepted), given that what it shares is, and no earlier draft goes on rightly.
    """
    left = [1.0]  # per node, the root first: P(the target comes there and leaves all drafts)
    inner = [False]  # per node, whether a draft goes on there
    paths: list[list[int]] = []  # the nodes on each draft's path
    out = []
    for k, draft in enumerate(drafts):
        path = [0]
        for other, nodes in zip(drafts, paths, strict=False):
            first = common(draft, other)
            if first >= len(path):
                path = nodes[: first + 1]
        first, start = len(path) - 1, path[-1]
        if inner[start]:
            given = after[k]
        else:
            come = alone[k][first - 1] if first else 1.0
            given = [p / come if come > 0 else 0.0 for p in alone[k][first:]]
        reach = left[start]
        own = [reach * p for p in given[: len(draft) - first]]
        if own:
            left[start] = max(0.0, reach - own[0])
            inner[start] = True
            paths.append([*path, *range(len(left), len(left) + len(own))])
            left += [max(0.0, p - next_p) for p, next_p in pairwise(own)]
            left.append(own[-1])
            inner += [True] * (len(own) - 1)
            inner.append(False)
        else:
            paths.append(path)
        out.append(own)
    return out


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """What trees may hold, and what each draft token would bring."""

    drafts: Drafts
    survivals: list[list[float]]
    """Per request, of all draft tokens, falling."""
    owners: list[list[str]]
    """Per request, whose these tokens are."""
    shared: dict[str, list[int]]
    """Per drafter and request, the tokens that an earlier draft has, too."""

    def chosen(self, windows: Sequence[int]) -> Drafts:
        """The drafts, cut to the likeliest `windows[i]` tokens of each request's tree."""
        owners = [of_request[:window] for of_request, window in zip(self.owners, windows, strict=True)]
        out: Drafts = {}
        for name, lists in self.drafts.items():
            own = [of_request.count(name) for of_request in owners]
            if any(own):
                parts = zip(lists, self.shared[name], own, strict=True)
                out[name] = [draft[: first + n] if n else [] for draft, first, n in parts]
        return out


def candidates(
    drafts: Drafts, alone: Mapping[str, Floats], after: Mapping[str, Floats], *, max_tokens: int, max_branches: int
) -> Candidates:
    """Args: what was drafted; per method [B][W], survivals of its drafts alone, and where all earlier ones err."""
    requests = len(next(iter(drafts.values())))
    drafts = fitted(drafts, max_tokens=len(drafts) * max_tokens, max_branches=max_branches)
    names = list(drafts)
    lone = [alone[name].tolist() for name in names]
    # The first draft has no draft before it.
    late = [after[name].tolist() if k else lone[0] for k, name in enumerate(names)]
    all_survivals: list[list[float]] = []
    all_owners: list[list[str]] = []
    shared: dict[str, list[int]] = {name: [] for name in names}
    for i in range(requests):
        of_request = [drafts[name][i] for name in names]
        rows = survivals(of_request, [lists[i] for lists in lone], [lists[i] for lists in late])
        for name, draft, own in zip(names, of_request, rows, strict=True):
            shared[name].append(len(draft) - len(own))
        chances, owners = _in_order(names, rows)
        all_survivals.append(chances[:max_tokens])
        all_owners.append(owners[:max_tokens])
    return Candidates(drafts=drafts, survivals=all_survivals, owners=all_owners, shared=shared)


def _in_order(names: Sequence[str], rows: Sequence[list[float]]) -> tuple[list[float], list[str]]:
    """(probabilities, whose) of all drafts' own tokens, best first; a token never comes before its parent."""
    filled = [(name, own) for name, own in zip(names, rows, strict=True) if own]
    if len(filled) == 1:
        name, own = filled[0]
        return own, [name] * len(own)
    pairs = [(-p, name) for name, own in filled for p in own]
    pairs.sort(key=itemgetter(0))  # stable
    return [-p for p, _ in pairs], [name for _, name in pairs]
