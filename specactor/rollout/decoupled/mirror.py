"""One request as a drafter has it: its prompt, what is committed, what is drafted ahead, and guesses beside that. PURE.

Invariants: the first `committed` tokens are what the engine told; draft tokens follow them, drafted from them alone;
`AHEAD` windows of them at most. A lane tells truly how many of its tokens the continuer was shown in the last lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specactor.rollout.decoupled import messages
from specactor.rollout.decoupled.branches import Guess, Guesses
from specactor.rollout.decoupled.continuer import Lane
from specactor.rollout.decoupled.foresight import Judged
from specactor.rollout.decoupled.messages import Open, Tail
from specactor.rollout.draft.verification import common

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
    guesses: Guesses | None
    """None: none are made."""
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
    _asked: Guess | None = None
    """What the last lane was about; None: the draft itself."""
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
        """Tokens, guesses left out."""
        return len(self.opening.prompt_ids) + len(self.tokens)

    @property
    def most_held(self) -> int:
        """The same, when all is drafted that may be before the next commit; no lane is longer."""
        return len(self.opening.prompt_ids) + self.committed + AHEAD * self.window

    @property
    def wants_token(self) -> bool:
        """Of the draft."""
        return self.complete and not self._stuck and self._room > 0

    @property
    def wants_guess(self) -> bool:
        """The draft is there as far as it may be, and guesses are not."""
        return (
            self.guesses is not None
            and self.complete
            and self._room <= 0
            and self.guesses.next(self.committed) is not None
        )

    @property
    def _room(self) -> int:
        """Draft tokens that may still be made."""
        return AHEAD * self.window - self.num_ahead

    def lane(self) -> Lane:
        """For the next call of the continuer; one of the two is wanted. Valid until the mirror changes."""
        self._asked = guess = None if self.guesses is None or self._room > 0 else self.guesses.next(self.committed)
        tokens = self.tokens if guess is None else [*self.tokens[: guess.position], guess.bonus, *guess.tokens]
        since = tokens[self._shown_from :]
        return Lane(
            key=self.key,
            prompt_ids=self.opening.prompt_ids,
            tokens=tokens,
            seed=self.opening.seed,
            temperature=self.opening.temperature,
            agreed=self._shown_from + common(self._shown, since),
            committed=self.committed,
        )

    def extended(self, lane: Lane, draft: Sequence[int], runner_ups: Sequence[int]) -> int:
        """What the continuer answered to the last lane; returns how many tokens were kept."""
        self._shown_from, self._shown = self.committed, list(lane.tokens[self.committed :])
        if self._asked is not None and self.guesses is not None:
            kept = self.guesses.extend(self._asked, draft)
            self.unsent = self.unsent or self._asked.complete or len(self._asked.tokens) == kept
            return kept
        tokens = draft[: self._room]
        if self.guesses is not None:
            self.guesses.learn(len(self.tokens), runner_ups[: len(tokens)])
        self.tokens += tokens
        self._stuck = not tokens
        self.unsent = self.unsent or bool(tokens)
        return len(tokens)

    def commit(self, fresh: Sequence[int], now_s: float) -> int:
        """These tokens are committed after those that are; returns how many drafted ones are thrown away."""
        ahead = self.tokens[self.committed :]
        agreed = common(ahead, fresh)
        wasted = 0
        if agreed == len(fresh):
            wasted = self.guesses.drop_before(self.committed + agreed) if self.guesses else 0
        else:
            position = self.committed + agreed
            foreseen = self.guesses.after(position, fresh[agreed:]) if self.guesses else []
            wasted = len(ahead) - agreed - len(foreseen) + (self.guesses.clear() if self.guesses else 0)
            self.tokens[position:] = [*fresh[agreed:], *foreseen]
            self.unsent = bool(foreseen)
        self.committed += len(fresh)
        self._stuck = False
        if not self.num_ahead:
            self.emptied_s = now_s
        return wasted

    def judged(self, fresh: Sequence[int]) -> Judged:
        """What these tokens, committed after those that are, say of the draft."""
        ahead = self.tokens[self.committed :]
        right = common(ahead, fresh)
        examined = min(right + 1, len(ahead), len(fresh))
        foreseen = None
        if examined > right and self.guesses is not None:
            foreseen = self.guesses.foresaw(self.committed + right, fresh[right])
            if foreseen:
                foreseen = right < self.window  # no branch begins behind it
        return Judged(
            window=self.window,
            ahead=min(len(ahead), self.window),
            examined=examined,
            right=right,
            foreseen=foreseen,
            fresh=len(fresh),
        )

    def tail(self, *, version: int, now_s: float) -> Tail:
        """All that is ahead. The engine has it then."""
        self.unsent = False
        wait_us = 0
        if self.emptied_s is not None:
            wait_us = max(1, round((now_s - self.emptied_s) * 1e6))
            self.emptied_s = None
        return Tail(
            request=self.key[1],
            base=self.committed,
            tokens=messages.pack(self.tokens[self.committed :]),
            version=version,
            wait_us=wait_us,
            branches=self.guesses.branches(self.committed) if self.guesses else [],
        )
