"""What is verified in a round, and what of it is kept. PURE: token ids in, token ids out.

A round verifies, per request, a tree of draft tokens below the last committed token. Its rows are the root (the last
committed token) and then the draft tokens, parents before children; the target's answer to a row is the token that it
samples after that row's path, with the noise of (request seed, position).

Invariant: `accepted_path` returns the rows along which the draft tokens equal the target's samples, so the samples on
those rows are exactly the tokens that decoding one at a time would have emitted. What was drafted cannot change them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tokens of one request. A chain is a tree in which every token follows the one before."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """Row of each token's parent: 0 is the root, 1 the first draft token; always smaller than the token's own row."""

    @property
    def num_rows(self) -> int:
        return 1 + len(self.tokens)

    def depths(self) -> list[int]:
        """Per row, the number of tokens between it and the root."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(len(self.parents)))


def chain(tokens: Sequence[int]) -> DraftTree:
    """One draft token after the other."""
    return DraftTree(tuple(tokens), tuple(range(len(tokens))))


def merged(drafts: Sequence[Sequence[int]]) -> DraftTree:
    """The tree of several chains; common beginnings are held once."""
    tokens: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}
    for draft in drafts:
        row = 0
        for token in draft:
            child = children.get((row, token))
            if child is None:
                tokens.append(token)
                parents.append(row)
                child = children[row, token] = len(tokens)
            row = child
    return DraftTree(tuple(tokens), tuple(parents))


def accepted_path(tree: DraftTree, samples: Sequence[int]) -> list[int]:
    """Rows from the root down, along draft tokens that equal the sample of the row above.

    Args: samples, one per row. The emitted tokens are the samples of the returned rows: accepted ones, then the bonus.
    """
    path = [0]
    for row, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), start=1):
        if parent == path[-1] and token == samples[parent]:
            path.append(row)
    return path
