"""Decoding played on a clock: verifiers, a drafter with its steps, messages and coins. Nobody waits for
anybody.

The planner predicts rounds that go on and on with as many requests. Those of a benchmark end, and not in one round,
since they accept different numbers of draft tokens; the last ones share an engine with nobody. `.._of_endless` say
what that costs.

Invariants: a draft token on another prefix than its own is never verified; equal arguments give equal results.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from statistics import fmean

from specactor.planning.plans import Pace, coupled_tokens
from specactor.rollout.speculation.acceptance import survival_of

ENDLESS = 1 << 40  # tokens
ROUNDS = 3000  # of requests that do not end
PLAYED = 96  # requests, of all plays together
LEAST = 8  # plays of a batch, until it has ended


@dataclass(slots=True)
class Text:
    """A request at both ends, as positions in its output."""

    committed: int = 0
    known: int = 0  # committed, as the drafter knows
    end: int = 0  # of what is drafted
    wrong: int | None = None  # the first wrong draft token
    tails: list[tuple[float, int, int | None]] = field(default_factory=list)
    """(when it arrives, end, first wrong) of what was sent."""

    def hear(self, committed: int) -> None:
        """The drafter is told."""
        self.known = committed
        if self.wrong is not None and self.wrong < committed:
            self.end, self.wrong = committed, None
        self.end = max(self.end, committed)

    def draft(self, *, right: bool, arrives_s: float) -> None:
        """One more token."""
        if self.wrong is None and not right:
            self.wrong = self.end
        self.end += 1
        self.tails.append((arrives_s, self.end, self.wrong))

    def verified(self, now_s: float, window: int) -> tuple[int, int]:
        """(draft tokens that are verified, that are accepted) in a round that begins now."""
        arrived = sum(tail[0] <= now_s for tail in self.tails)
        if not arrived:
            return 0, 0
        del self.tails[: arrived - 1]
        _, end, wrong = self.tails[0]
        if wrong is not None and wrong < self.committed:
            return 0, 0
        drafted = max(0, min(window, end - self.committed))
        return drafted, drafted if wrong is None else min(drafted, wrong - self.committed)


@dataclass(slots=True)
class Drafting:
    """A drafter process."""

    pace: Pace
    p: float
    rng: random.Random
    now_s: float = 0.0  # its next step begins
    told: list[tuple[float, list[tuple[Text, int]]]] = field(default_factory=list)
    """(when it arrives, what is committed)."""

    def until(self, end_s: float, texts: list[Text]) -> None:
        message_s = self.pace.message_s / 2
        while self.now_s < end_s:
            while self.told and self.told[0][0] <= self.now_s:
                for text, committed in self.told.pop(0)[1]:
                    text.hear(committed)
            lanes = [text for text in texts if text.end - text.known < self.pace.most]
            if not lanes:
                self.now_s = self.told[0][0] if self.told else end_s + message_s
                continue
            self.now_s += self.pace.token_s
            for text in lanes:
                text.draft(right=self.rng.random() < self.p, arrives_s=self.now_s + message_s)


@dataclass(frozen=True, kw_only=True)
class Played:
    """What a batch did."""

    rounds: int
    tokens: int  # emitted, of all requests
    seconds: float


def decoupled(
    p: float,
    window: int,
    pace: Pace,
    *,
    tokens: int = ENDLESS,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> Played:
    """Until each request has emitted `tokens`, or so many rounds are over. `p`: P(a draft token is right)."""
    rng = random.Random(seed)
    drafter = Drafting(pace=pace, p=p, rng=rng)
    texts = [Text() for _ in range(pace.requests)]
    live, now_s, done = texts, 0.0, 0
    while live and done < rounds:
        drafter.told.append((now_s + pace.message_s / 2, [(text, text.committed) for text in live]))
        found = [text.verified(now_s, window) for text in live]
        rows = len(live) + sum(drafted for drafted, _ in found)
        round_s = pace.round_s.at(len(live), rows / len(live))
        now_s += round_s
        drafter.until(now_s, live)
        for text, (_, right) in zip(live, found, strict=True):
            text.committed += right + 1
        live, done = [text for text in live if text.committed < tokens], done + 1
    return Played(rounds=done, tokens=sum(text.committed for text in texts), seconds=now_s)


def coupled(p: float, window: int, pace: Pace, *, tokens: int, seed: int = 0) -> Played:
    """The same where whole windows are there, and `pace.round_s` has their drafting."""
    rng = random.Random(seed)
    left, now_s, done = [tokens] * pace.requests, 0.0, 0
    while left:
        now_s += pace.round_s.at(len(left), 1.0 + window)
        emitted = [1 + next((k for k in range(window) if rng.random() >= p), window) for _ in left]
        left, done = [n - e for n, e in zip(left, emitted, strict=True) if n > e], done + 1
    return Played(rounds=done, tokens=pace.requests * tokens, seconds=now_s)


def decoupled_of_endless(p: float, window: int, pace: Pace, *, tokens: int) -> float:
    """Speed of batches whose requests end after so many tokens, over that of one whose requests do not."""
    endless = decoupled(p, window, pace, rounds=ROUNDS // max(2, pace.requests // 2))
    plays = [decoupled(p, window, pace, tokens=tokens, seed=seed) for seed in range(_plays(pace.requests))]
    seconds = fmean(play.seconds for play in plays)
    return pace.requests * tokens / seconds * endless.seconds / endless.tokens


def coupled_of_endless(p: float, window: int, pace: Pace, *, tokens: int, engines: int) -> float:
    """The same of engines that share a batch, which is over when the last has ended."""
    emitted = pace.requests * coupled_tokens(survival_of(p, window), window)
    speed = emitted / pace.round_s.at(pace.requests, 1.0 + window)
    plays = [coupled(p, window, pace, tokens=tokens, seed=seed) for seed in range(_plays(pace.requests) * engines)]
    each = [play.seconds for play in plays]
    seconds = fmean(max(each[first : first + engines]) for first in range(0, len(each), engines))
    return pace.requests * tokens / seconds / speed


def _plays(requests: int) -> int:
    return max(LEAST, PLAYED // requests)
