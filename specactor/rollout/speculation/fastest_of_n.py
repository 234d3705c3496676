"""Fastest-of-N (Algorithm 3 of 2511.16193): requests that accept least get further methods, in one tree. PURE.

Invariants: a request has a method once, and at most `most`; a tree has at most `max_window` tokens, all at most
`max_branches` branches; probabilities after a token add up to at most its own.

Shape legend: B requests, W windows 1..max_window, M methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter

from specactor.rollout.speculation.acceptance import Floats
from specactor.rollout.speculation.verification import Drafts, common, held
from specactor.rollout.speculation.windows import OFF


def further(
    owners: Sequence[str], drafts: Drafts, own: Mapping[str, Floats], *, ranked: Sequence[str], most: int
) -> list[list[str]]:
    """Return each request's methods, its own first; none without an owner (OFF).

    Args:
        own: survivals by method [B][W], 0 behind the ends of drafts.
        ranked: methods, the best first.
        most: methods per request.
    """
    methods = [[] if name == OFF else [name] for name in owners]
    owned = [i for i, name in enumerate(owners) if name != OFF]
    for i in sorted(owned, key=lambda i: float(own[owners[i]][i, 0]))[:16]:  # each takes 0.1 ms
        others = [name for name in ranked if name != owners[i] and drafts[name][i]]
        methods[i] += others[: most - 1]
    return methods


def fitted(drafts: Mapping[str, Sequence[Sequence[int]]], *, max_tokens: int, max_branches: int) -> Drafts:
    """Cut drafts to what trees can hold; leave out empty drafters."""
    names = [name for name, lists in drafts.items() if any(lists)]
    of_requests = list(zip(*(drafts[name] for name in names), strict=True))
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
    """Return P(accepted) of each draft's own tokens, for one request.

    Args:
        alone: [k][j], P(the first j + 1 tokens of draft k are accepted).
        after: [k][j], of its own tokens, where what it shares is accepted and no earlier draft goes on rightly.
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


def candidates(
    drafts: Drafts, alone: Mapping[str, Floats], after: Mapping[str, Floats], *, max_tokens: int, max_branches: int
) -> tuple[list[list[float]], Callable[[Sequence[int]], Drafts]]:
    """Return (each request's survivals of all its draft tokens, falling; windows -> drafts of those tokens).

    `alone`, `after`: as of `survivals`, by method [B][W].
    """
    requests = len(next(iter(drafts.values())))
    drafts = fitted(drafts, max_tokens=len(drafts) * max_tokens, max_branches=max_branches)
    names = list(drafts)
    lone = [alone[name].tolist() for name in names]
    # The first draft has no draft before it.
    late = [after[name].tolist() if k else lone[0] for k, name in enumerate(names)]
    all_survivals: list[list[float]] = []
    all_owners: list[list[str]] = []
    shared: dict[str, list[int]] = {name: [] for name in names}  # per request, tokens that an earlier draft has, too
    for i in range(requests):
        of_request = [drafts[name][i] for name in names]
        rows = survivals(of_request, [lists[i] for lists in lone], [lists[i] for lists in late])
        for name, draft, own in zip(names, of_request, rows, strict=True):
            shared[name].append(len(draft) - len(own))
        pairs = [(-p, name) for name, own in zip(names, rows, strict=True) for p in own]
        pairs.sort(key=itemgetter(0))  # best first; stable, so parents come before
        all_survivals.append([-p for p, _ in pairs[:max_tokens]])
        all_owners.append([name for _, name in pairs[:max_tokens]])

    def chosen(windows: Sequence[int]) -> Drafts:
        owners = [of_request[:window] for of_request, window in zip(all_owners, windows, strict=True)]
        out: Drafts = {}
        for name, lists in drafts.items():
            own = [of_request.count(name) for of_request in owners]
            if any(own):
                parts = zip(lists, shared[name], own, strict=True)
                out[name] = [draft[: first + n] if n else [] for draft, first, n in parts]
        return out

    return all_survivals, chosen
