"""One request as a drafter has it: its prompt, what is committed, and what is drafted ahead. PURE.

Invariants: the first `committed` tokens are what the engine told; draft tokens follow them, drafted from them alone;
`AHEAD` windows of them at most. A lane tells truly how many of its tokens the continuer was shown in the last lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specactor.rollout.decoupled import protocol
from specactor.rollout.decoupled.backend import Lane
from specactor.rollout.decoupled.protocol import Open, Tail
from specactor.rollout.speculation.verification import common

AHEAD = 2
"""Windows: one that the engine can verify now, and one ahead of that."""
Key = tuple[int, int]
"""Session of the engine, number of the request there."""


@dataclass(slots=True, eq=False)
class Mirror:
    """Beside its methods, `Mirrors` reads and sets the fields without an underscore."""

    key: Key
    opening: Open
    tokens: list[int]
    """Committed, then drafted ahead."""
    committed: int
    emptied_s: float | None
    """When a commit left no draft token, if none was made since."""
    reserved: int = 0
    """Tokens that count against the bound."""
    complete: bool = True
    """No commit is missing."""
    unsent: bool = False
    """There are draft tokens that the engine was not sent."""
    _stuck: bool = False
    """The continuer had nothing to add to these tokens."""
    _shown_from: int = 0
    _shown: list[int] = field(default_factory=list)
    """Tokens of the last lane from a position on that was committed then."""

    @property
    def window(self) -> int:
        return self.opening.window

    @property
    def num_ahead(self) -> int:
        """Draft tokens."""
        return len(self.tokens) - self.committed

    @property
    def num_held(self) -> int:
        """Tokens."""
        return len(self.opening.prompt_ids) + len(self.tokens)

    @property
    def most_held(self) -> int:
        """The same, when all is drafted that may be before the next commit; no lane is longer."""
        return len(self.opening.prompt_ids) + self.committed + AHEAD * self.window

    @property
    def wants_token(self) -> bool:
        """Whether another draft token may be made."""
        return self.complete and not self._stuck and self._room > 0

    @property
    def _room(self) -> int:
        """Draft tokens that may still be made."""
        return AHEAD * self.window - self.num_ahead

    def lane(self) -> Lane:
        """For the next call of the continuer. Valid until the mirror changes."""
        return Lane(
            key=self.key,
            prompt_ids=self.opening.prompt_ids,
            tokens=self.tokens,
            seed=self.opening.seed,
            temperature=self.opening.temperature,
            agreed=self._shown_from + common(self._shown, self.tokens[self._shown_from :]),
            committed=self.committed,
        )

    def extended(self, lane: Lane, draft: Sequence[int]) -> int:
        """What the continuer answered to the last lane; returns how many tokens were kept."""
        self._shown_from, self._shown = self.committed, list(lane.tokens[self.committed :])
        tokens = draft[: self._room]
        self.tokens += tokens
        self._stuck = not tokens
        self.unsent = self.unsent or bool(tokens)
        return len(tokens)

    def commit(self, fresh: Sequence[int], now_s: float) -> int:
        """These tokens are committed after those that are; returns how many drafted ones are thrown away."""
        ahead = self.tokens[self.committed :]
        agreed = common(ahead, fresh)
        wasted = 0
        if agreed < len(fresh):
            wasted = len(ahead) - agreed
            self.tokens[self.committed + agreed :] = fresh[agreed:]
            self.unsent = False
        self.committed += len(fresh)
        self._stuck = False
        if not self.num_ahead:
            self.emptied_s = now_s
        return wasted

    def tail(self, now_s: float) -> Tail:
        """All that is ahead. The engine has it then."""
        self.unsent = False
        wait_us = 0
        if self.emptied_s is not None:
            wait_us = max(1, round((now_s - self.emptied_s) * 1e6))
            self.emptied_s = None
        return Tail(
            request=self.key[1],
            base=self.committed,
            tokens=protocol.pack(self.tokens[self.committed :]),
            wait_us=wait_us,
        )
