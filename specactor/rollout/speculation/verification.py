"""What is verified in a round, and what of it is kept. PURE.

A request's rows are its last committed token (the root) and its draft tokens, parents first; one that several drafts
share is one row, credited to the first of them.

Invariant: the target's samples along `accepted_path` are exactly what decoding one at a time would have emitted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from numbers import Integral
from typing import NamedTuple

Drafts = dict[str, list[list[int]]]  # per drafter, per request


class DraftTree(NamedTuple):
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """Row of each token's parent, smaller than its own: 0 is the root, 1 the first draft token."""

    @property
    def num_rows(self) -> int:
        return 1 + len(self.tokens)

    def depths(self) -> list[int]:
        """Return per row the number of tokens between it and the root."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    @property
    def is_chain(self) -> bool:
        return self.parents == _line(len(self.parents))


NOTHING = DraftTree()


_line = cache(lambda length: tuple(range(length)))
"""The parents of a chain, cached so that comparing them takes no time."""


def chain(tokens: Sequence[int]) -> DraftTree:
    return DraftTree(tuple(tokens), _line(len(tokens))) if tokens else NOTHING


def merged(drafts: Sequence[Sequence[int]]) -> DraftTree:
    """Return the tree of several chains, earlier ones first."""
    tokens, parents, _, _ = _grown(drafts)
    return DraftTree(tuple(tokens), tuple(parents))


def held(drafts: Sequence[Sequence[int]], *, max_tokens: int, max_branches: int) -> tuple[list[int], int]:
    """Return (tokens that a bounded tree has of each draft, an upper bound of its branches); drafts are cut to both
    limits."""
    _, _, lengths, rows = _grown(drafts, max_tokens, max_branches)
    return lengths, rows


def _grown(
    drafts: Sequence[Sequence[int]], max_tokens: int | None = None, max_branches: int | None = None
) -> tuple[list[int], list[int], list[int], int]:
    """Return (tokens, parents, tokens that the tree has of each draft, rows that do not follow the row before)."""
    tokens: list[int] = []
    parents: list[int] = []
    lengths: list[int] = []
    children: dict[tuple[int, int], int] = {}
    num_branches = 0  # at least the number of `branches`
    for draft in drafts:
        row = length = 0
        for token in draft:
            child = children.get((row, token))
            if child is None:
                is_branch = row != len(tokens)
                if len(tokens) == max_tokens or (is_branch and num_branches == max_branches):
                    break
                num_branches += is_branch
                tokens.append(token)
                parents.append(row)
                child = children[row, token] = len(tokens)
            row, length = child, length + 1
        lengths.append(length)
    return tokens, parents, lengths, num_branches


def branches(tree: DraftTree) -> list[list[int]]:
    """Return the paths from the root to the leaves, without one whose rows are consecutive."""
    inner = set(tree.parents)
    paths = []
    for leaf in range(1, tree.num_rows):
        if leaf in inner:
            continue
        path = [leaf]
        while path[-1] != 0:
            path.append(tree.parents[path[-1] - 1])
        if path[0] != len(path) - 1:
            paths.append(path[::-1])
    return paths


@dataclass(kw_only=True)
class Decision:
    drafter: str  # who leads, or OFF
    windows: list[int]  # most draft tokens to verify, per request
    depth: int = 0  # the largest window that was drafted
    drafts: list[list[int]]
    beside: Drafts = field(default_factory=dict)  # of further drafters: for other requests, or in the same trees
    kind: str = ""  # name under which the round's seconds are remembered; "": the drafter's
    to_draft: list[int] = field(default_factory=list)
    """Tokens per request that `drafter` is still to draft, in `Speculator.draft`; empty: all drafts are there."""
    predicted_s: float = 0.0  # of the whole round, uncorrected; 0: not known
    draft_s: float = 0.0  # of drafting, and of deciding what to verify

    @property
    def timed_as(self) -> str:
        """Return the kind of round that its seconds count for."""
        return self.kind or self.drafter

    @property
    def together(self) -> bool:
        """Whether all ranks are still to draft."""
        return any(self.to_draft)

    @property
    def trees(self) -> list[DraftTree]:
        if not self.beside:
            return [chain(draft) for draft in self.drafts]
        of_requests = ([draft for draft in of if draft] for of in zip(self.drafts, *self.beside.values(), strict=True))
        return [merged(drafts) if len(drafts) > 1 else chain(drafts[0] if drafts else ()) for drafts in of_requests]

    def take(self, drafts: Drafts) -> None:
        for name, lists in drafts.items():
            if name == next(iter(drafts)):
                self.drafter, self.drafts = name, lists
            else:
                self.beside[name] = lists


class Credit(NamedTuple):
    """What a draft of a tree brought beyond earlier ones."""

    first: int  # tokens that it shares with an earlier draft
    drafted: int  # its own tokens, which follow
    accepted: int
    agreed: int  # accepted tokens, the shared ones included
    reached: bool  # whether its own were tested: what it shares was accepted, and no earlier draft went on rightly


_NO_CREDIT = Credit(0, 0, 0, 0, False)


def credits_of(drafts: Sequence[Sequence[int]], accepted: Sequence[int]) -> list[Credit]:
    """Return the credit of each draft of a tree; `accepted` are draft tokens."""
    credits: list[Credit] = []
    best = 0  # accepted tokens that the drafts so far have
    for i, draft in enumerate(drafts):
        if not draft:
            credits.append(_NO_CREDIT)
            continue
        first = max((common(draft, other) for other in drafts[:i]), default=0)
        right = common(draft, accepted)
        credits.append(Credit(first, len(draft) - first, max(0, right - first), right, right >= first >= best))
        best = max(best, right)
    return credits


def existing(tokens: list[int], vocab_size: int | None) -> list[int]:
    """Return the tokens before the first invalid one; vocab_size None: negative ones are invalid."""
    size = sys.maxsize if vocab_size is None else vocab_size
    if not tokens or ({*map(type, tokens)} == {int} and min(tokens) >= 0 and max(tokens) < size):
        return tokens
    return [int(token) for token in takewhile(lambda t: isinstance(t, Integral) and 0 <= t < size, tokens)]


def common(some: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common beginning."""
    for length, (a, b) in enumerate(zip(some, others, strict=False)):
        if a != b:
            return length
    return min(len(some), len(others))


def accepted_path(tree: DraftTree, samples: Sequence[int]) -> list[int]:
    """Return the rows from the root down, along draft tokens that equal the sample of the row above."""
    if tree.is_chain:
        return [*range(1 + common(tree.tokens, samples))]
    path = [0]
    for row, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), start=1):
        if parent == path[-1] and token == samples[parent]:
            path.append(row)
    return path
