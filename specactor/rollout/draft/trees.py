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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specactor.rollout.draft.verification import Credit, branches, common, held, merged
from specactor.rollout.planning.acceptance import AcceptanceModel

AFTER_RATE = 0.3
"""Believed acceptance of a first token where earlier drafts were wrong, of a drafter nobody has seen. Hopeful."""

Drafts = dict[str, list[list[int]]]
"""Per drafter, per request."""


def fitted(drafts: Mapping[str, Sequence[Sequence[int]]], *, max_tokens: int, max_branches: int) -> Drafts:
    """The drafts, as far as the requests' trees can hold them. Drafters without any are left out."""
    names = [name for name, lists in drafts.items() if any(lists)]
    out: Drafts = {name: [] for name in names}
    for of_request in zip(*(drafts[name] for name in names), strict=True):
        tree = merged(of_request, max_tokens=max_tokens, max_branches=max_branches)
        max_branches -= len(branches(tree))
        for name, draft in zip(names, of_request, strict=True):
            out[name].append(list(draft[: held(tree, draft)]))
    return out


def survivals(
    drafts: Sequence[Sequence[int]], alone: Sequence[Sequence[float]], after: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Per draft of one request, P(accepted) of each of its own tokens.

    Args: alone[k][j], P(the first j + 1 tokens of draft k are accepted); after[k][j], P(the first j + 1 of its own are
    accepted), given that what it shares is, and no earlier draft goes on rightly.
    """
    left: dict[tuple[int, ...], float] = {(): 1.0}  # P(the target comes to a node and leaves all drafts there)
    inner: set[tuple[int, ...]] = set()
    out = []
    for k, draft in enumerate(drafts):
        first = max((common(draft, other) for other in drafts[:k]), default=0)
        start = tuple(draft[:first])
        if start in inner:
            given = after[k]
        else:
            come = alone[k][first - 1] if first else 1.0
            given = [p / come if come > 0 else 0.0 for p in alone[k][first:]]
        own = [left[start] * p for p in given[: len(draft) - first]]
        for depth, p in enumerate(own, first):
            parent = tuple(draft[:depth])
            inner.add(parent)
            left[parent] = max(0.0, left[parent] - p)
            left[tuple(draft[: depth + 1])] = p
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

    def chosen(self, windows: Sequence[int]) -> Drafts:
        """The drafts, cut to the likeliest `windows[i]` tokens of each request's tree."""
        out: Drafts = {name: [] for name in self.drafts}
        for i, window in enumerate(windows):
            owners = self.owners[i][:window]
            before: list[list[int]] = []
            for name, lists in self.drafts.items():
                own = owners.count(name)
                first = max((common(lists[i], other) for other in before), default=0)
                before.append(lists[i])
                out[name].append(lists[i][: first + own] if own else [])
        return fitted(out, max_tokens=sum(windows), max_branches=sum(map(len, self.survivals)))


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
        all_survivals, all_owners = [], []
        for i, request_id in enumerate(ids):
            of_request = {name: lists[i] for name, lists in held_drafts.items()}
            rows = survivals(
                list(of_request.values()),
                [_survival(acceptance[name], request_id, draft) for name, draft in of_request.items()],
                [_survival(self._after[name], request_id, draft) for name, draft in of_request.items()],
            )
            pairs = [(p, name) for name, own in zip(of_request, rows, strict=True) for p in own]
            pairs.sort(key=lambda pair: -pair[0])  # stable: a token never comes before its parent
            all_survivals.append([p for p, _ in pairs[: self._max_window]])
            all_owners.append([name for _, name in pairs[: self._max_window]])
        return Candidates(drafts=held_drafts, survivals=all_survivals, owners=all_owners)

    def learn(self, request_id: str, credits: Mapping[str, Credit]) -> None:
        """A request's tree was verified."""
        for name, credit in credits.items():
            if credit.reached and credit.drafted:
                self._after[name].observe(request_id, credit.drafted, credit.accepted)

    def forget(self, request_id: str) -> None:
        for model in self._after.values():
            model.forget(request_id)

    def new_version(self, weight: float) -> None:
        for model in self._after.values():
            model.new_version(weight)


def _survival(model: AcceptanceModel, request_id: str, draft: Sequence[int]) -> list[float]:
    return model.survival(request_id, model.max_window, drafted=len(draft))
