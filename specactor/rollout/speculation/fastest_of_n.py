"""Further drafts for requests that have one (Algorithm 3 of 2511.16193 in an engine). PURE: estimates in, names out.

When few requests run, rows are cheap to verify and each request's next tokens are waited for. Then one that is often
rejected gets the drafts of further methods, in one tree with its own: all lead to the same tokens, so whichever is
right is kept. `fastest_of_n.while_it_pays` decides, with requests by acceptance ascending, methods by gain.
A method's worker is the round itself, and its bound is the room for branches.

A further draft pays if a round in which every request had such a one would emit more tokens per second. It is of use
where it leaves the others and they are wrong, and what it brings there is what it has brought after such errors
(`trees.Merging`). So with many requests, where rows are dear, nobody gets any: no threshold says how few is few. Most
requests of many are settled by a bound, which does not look where drafts part.

Invariants: a request has each method at most once, and at most `most` of them; only drafts that are there count;
nothing is added whose predicted gain is `MARGIN` or less, and no predicted gain is below 1.

Shape legend: B requests, W windows 1..max_window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from specactor.rollout.speculation.reconfiguration import LiveCosts
from specactor.rollout.speculation.stragglers import DryWorker, Straggler, while_it_pays
from specactor.rollout.speculation.trees import survivals
from specactor.rollout.speculation.verification import Drafts
from specactor.rollout.speculation.windows import OFF

MARGIN = 0.02
MOST_REQUESTS = 16
"""That get further drafts in a round, at most: looking at a request's trees takes 0.1 ms. Those that accept least."""

Floats = NDArray[np.float64]


def further(
    ids: Sequence[str],
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

    Args: whose draft each request has (OFF: none, and it gets none); all drafts; per method [B][W], survivals of the
    tokens that are there, 0 behind the last, and the same where earlier drafts were wrong; methods, the best first;
    seconds of rounds; methods per request, and requests per method, at most.
    """
    methods = [[] if name == OFF else [name] for name in owners]
    if most < 2 or room < 1:
        return methods
    gains = Gains(owners, drafts, own, after, costs)
    promising_B = np.max([gains.bound[name] for name in ranked], axis=0) > 1.0 + MARGIN
    stragglers = [
        Straggler(
            request_id=str(i),
            acceptance=float(own[owners[i]][i, 0]),
            methods=frozenset((owners[i], *(name for name in ranked if not drafts[name][i]))),
        )
        for i in sorted(promising_B.nonzero()[0].tolist(), key=lambda i: float(own[owners[i]][i, 0]))[:MOST_REQUESTS]
    ]
    workers = [DryWorker(name=name, method=name, max_load=room) for name in ranked]
    for pair in while_it_pays(stragglers, ranked, workers, pays=gains, margin=MARGIN, most=most - 1):
        methods[int(pair.request_id)].append(pair.method)
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

    def __call__(self, request: Straggler, has: frozenset[str], method: str, load: int) -> float:
        i = int(request.request_id)
        if self.bound[method][i] <= 1.0 + MARGIN:
            return 1.0
        name = self._owners[i]
        there = (name, *sorted(m for m in has if m != name and self._drafts[m][i]))
        return self._of_trees(i, (*there, method)) / self._of_trees(i, there)

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
        """Of the tree of these drafts of request i."""
        speed = self._speeds.get((i, methods))
        if speed is None:
            drafts = [self._drafts[name][i] for name in methods]
            alone, after = ([table[name][i].tolist() for name in methods] for table in (self._own, self._after))
            speed = self._speeds[i, methods] = float(
                self._best(np.concatenate(survivals(drafts, alone, after))[None])[0]
            )
        return speed
