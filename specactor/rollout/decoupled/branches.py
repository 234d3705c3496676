"""Drafts for the case that a tail is wrong, made before it is known to be. PURE.

Where a drafter that samples would be wrong, the target's token is often its second choice there, its runner-up. While
a request has two windows of draft tokens ahead, and its drafter nothing else to do, that goes on from the runner-up at
the first position, at the second, and so on. After a rejection a draft then is there at once, and not a round later.
Source: drafting for the outcomes of the verify that is in flight, arXiv 2603.03251; the choice of outcomes is ours.

Invariant: a guess stands on the tail's own tokens before its position, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from specactor.rollout.decoupled.messages import Branch, pack, unpack
from specactor.rollout.draft.verification import common

NONE = -1
"""In place of a runner-up."""


@runtime_checkable
class RunnerUps(Protocol):
    """A `Continuer` with second choices; without them there are no branches."""

    guessing: bool
    """Whether they are wanted from the next `extend` on; its owner sets it."""

    def runner_ups(self) -> list[list[int]]:
        """What the last `extend` would have answered in place of each of its tokens; NONE where it does not know."""


@dataclass(slots=True, kw_only=True)
class Guess:
    """What may follow where a tail may be wrong."""

    position: int
    """In the output."""
    bonus: int
    """The token there."""
    tokens: list[int] = field(default_factory=list)
    """After it."""
    complete: bool = False
    """No more are wanted, or none can be had."""


class Guesses:
    """Of one request."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._runner_ups: dict[int, int] = {}
        self._guesses: dict[int, Guess] = {}

    @property
    def num_tokens(self) -> int:
        """Drafted for all guesses."""
        return sum(len(guess.tokens) for guess in self._guesses.values())

    @staticmethod
    def bound(window: int) -> int:
        """Of all tokens of a request's guesses, runner-ups included."""
        return window * (window + 1)

    def learn(self, position: int, runner_ups: Sequence[int]) -> None:
        """Second choices for the draft tokens from this position on."""
        for at, token in enumerate(runner_ups, position):
            if token != NONE:
                self._runner_ups[at] = token

    def foresaw(self, position: int, token: int) -> bool | None:
        """Whether the second choice there was this token; None where it is not known."""
        return self._runner_ups[position] == token if position in self._runner_ups else None

    def next(self, committed: int) -> Guess | None:
        """The one to go on with: the first incomplete one of the window that may be in the verifier's hands."""
        for position in range(committed, committed + self._window):
            guess = self._guesses.get(position)
            if guess is None and position in self._runner_ups:
                guess = self._guesses[position] = Guess(position=position, bonus=self._runner_ups[position])
            if guess is not None and not guess.complete:
                return guess
        return None

    def extend(self, guess: Guess, tokens: Sequence[int]) -> int:
        """The continuer's answer; returns how many tokens were kept."""
        kept = list(tokens[: self._window - len(guess.tokens)])
        guess.tokens += kept
        guess.complete = not kept or len(guess.tokens) == self._window
        return len(kept)

    def after(self, position: int, fresh: Sequence[int]) -> list[int]:
        """What was drafted beyond these tokens, committed from `position` on; nothing if none foresaw them."""
        guess = self._guesses.get(position)
        if guess is None or guess.bonus != fresh[0] or common(guess.tokens, fresh[1:]) < len(fresh) - 1:
            return []
        return guess.tokens[len(fresh) - 1 :]

    def drop_before(self, position: int) -> int:
        """The output has come so far, as drafted; returns how many tokens went."""
        before = self.num_tokens
        for at in [at for at in self._runner_ups if at < position]:
            del self._runner_ups[at]
            self._guesses.pop(at, None)
        return before - self.num_tokens

    def clear(self) -> int:
        """The output is another than was drafted; returns how many tokens went."""
        before = self.num_tokens
        self._runner_ups.clear()
        self._guesses.clear()
        return before

    def branches(self, committed: int) -> list[Branch]:
        """For a tail whose first token has this position."""
        return [
            Branch(accepted=guess.position - committed, bonus=guess.bonus, tokens=pack(guess.tokens))
            for guess in self._guesses.values()
            if guess.tokens
        ]


def chain(tokens: list[int], branches: Sequence[Branch], known: Sequence[int]) -> list[int]:
    """The way through a tail and its branches that begins with `known`; empty if there is none."""
    right = common(tokens, known)
    if right == len(known):
        return tokens
    for branch in branches:
        if branch.accepted == right and branch.bonus == known[right]:
            way = [*tokens[:right], branch.bonus, *unpack(branch.tokens)]
            if common(way, known) == len(known):
                return way
    return []
