"""Which draft tokens of several drafters one tree holds. PURE: drafts and estimates in, drafts out.

The drafts of a request are merged in the drafters' order. A draft's *own* tokens are those that no earlier draft has;
where they begin, the target has to disagree with all earlier drafts for them to be accepted. So their probability is
that of coming so far and meeting none of the earlier continuations, times what is known about the drafter after such
disagreement: drafters that err together are worth less than their acceptance says.

Invariants: a tree has at most `max_window` draft tokens, and all trees together at most as many branches as there is
room for; where that is none, a request's first draft stays alone; a token's probability is at most its parent's, and
those of all tokens that follow one token add up to at most its own; only the past is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from specactor.rollout.speculation.acceptance import AcceptanceModel
from specactor.rollout.speculation.verification import Credit, Drafts, common, held

AFTER_RATE = 0.3
"""Believed acceptance of a first token where earlier drafts were wrong, of a drafter nobody has seen. Hopeful."""


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


class Merging:
    """What becomes of drafts where earlier ones are wrong, per drafter."""

    def __init__(self, names: Sequence[str], *, max_window: int) -> None:
        self._max_window = max_window
        self._after = {name: AcceptanceModel(max_window=max_window, prior_rate=AFTER_RATE) for name in names}

    def candidates(
        self, ids: Sequence[str], drafts: Drafts, acceptance: Mapping[str, AcceptanceModel], *, max_branches: int
    ) -> Candidates:
        """Args: the requests' ids; what was drafted; each drafter's acceptance alone."""
        held_drafts = fitted(drafts, max_tokens=len(drafts) * self._max_window, max_branches=max_branches)
        names = list(held_drafts)
        alone = [_survivals(acceptance[name], ids) for name in names]
        # The first draft has no draft before it.
        after = [_survivals(self._after[name], ids) if k else alone[0] for k, name in enumerate(names)]
        all_survivals: list[list[float]] = []
        all_owners: list[list[str]] = []
        shared: dict[str, list[int]] = {name: [] for name in names}
        for i in range(len(ids)):
            of_request = [held_drafts[name][i] for name in names]
            rows = survivals(of_request, [lists[i] for lists in alone], [lists[i] for lists in after])
            for name, draft, own in zip(names, of_request, rows, strict=True):
                shared[name].append(len(draft) - len(own))
            chances, owners = _in_order(names, rows)
            all_survivals.append(chances[: self._max_window])
            all_owners.append(owners[: self._max_window])
        return Candidates(drafts=held_drafts, survivals=all_survivals, owners=all_owners, shared=shared)

    def after(self, name: str, ids: Sequence[str]) -> NDArray[np.float64]:
        """[requests][max_window]: P(its first j draft tokens are accepted), where all earlier drafts were wrong."""
        return self._after[name].survivals(ids, covered=True)

    def learn(self, request_id: str, credits: Iterable[tuple[str, Credit]]) -> None:
        """A request's tree was verified."""
        is_first = True
        for name, credit in credits:
            if credit.reached and credit.drafted and not is_first:
                self._after[name].observe(request_id, credit.drafted, credit.accepted)
            is_first &= credit.first + credit.drafted == 0

    def forget(self, request_id: str) -> None:
        for model in self._after.values():
            model.forget(request_id)

    def new_version(self, weight: float) -> None:
        for model in self._after.values():
            model.new_version(weight)


def _in_order(names: Sequence[str], rows: Sequence[list[float]]) -> tuple[list[float], list[str]]:
    """(probabilities, whose) of all drafts' own tokens, best first; a token never comes before its parent."""
    filled = [(name, own) for name, own in zip(names, rows, strict=True) if own]
    if len(filled) == 1:
        name, own = filled[0]
        return own, [name] * len(own)
    pairs = [(-p, name) for name, own in filled for p in own]
    pairs.sort(key=itemgetter(0))  # stable
    return [-p for p, _ in pairs], [name for _, name in pairs]


def _survivals(model: AcceptanceModel, ids: Sequence[str]) -> list[list[float]]:
    """Per request, of draft tokens that are there."""
    if len(ids) == 1:
        return [model.survival(ids[0], model.max_window, drafted=model.max_window)]
    table: list[list[float]] = model.survivals(ids, covered=True).tolist()
    return table
