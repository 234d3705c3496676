"""What the draft model drafts and what refreshes have done for it, as far as is known. PURE.

Invariant: only rollouts and refreshes that have ended count, and the state that a checkpoint keeps is all there is, so
a resumed run decides as the run that was interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from statistics import mean, stdev
from typing import Any

from specactor.rollout.draft.counts import Counts

USUAL_DECAY = 0.98
"""What accept_length was, is worth per rollout that did not reach it."""
LOST = 0.9
"""Below this share of what it was, accept_length is to be recovered."""
RECENT, FEW = 8, 3
"""Refreshes whose gains count; with fewer, nothing is known."""
DRAFTED_BY = ("model", "decoupled")
"""Drafters with the draft model's weights."""


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """By the draft model, in one rollout."""

    accept_length: float
    """Tokens emitted per verify of its drafts."""
    window: float
    """Mean number of its draft tokens per verify."""
    share: float
    """Of the requests' rounds, those with its drafts."""

    @classmethod
    def of(cls, counts: Mapping[str, Counts], num_tokens: int) -> Drafted | None:
        """None where nothing of it was verified. Args: per drafter; response tokens of the rollout."""
        own = [counts[name] for name in DRAFTED_BY if name in counts]
        verifies = sum(of.verifies for of in own)
        if not verifies:
            return None
        speculated = [of for of in counts.values() if of.verifies]
        plain = max(0, num_tokens - sum(of.emitted for of in speculated))
        return cls(
            accept_length=max(1.0, sum(of.emitted for of in own) / verifies),
            window=sum(of.drafted for of in own) / verifies,
            share=verifies / (sum(of.verifies for of in speculated) + plain),
        )


def accept_length(overlap: float, window: float) -> float:
    """Tokens per verify when every draft token is accepted with this probability: 1 + a + ... + a ** window."""
    return window + 1 if overlap >= 1 else (1 - overlap ** (window + 1)) / (1 - overlap)


@dataclass(kw_only=True)
class History:
    """Of one run."""

    last: float | None = None
    """accept_length of the last rollout that had one."""
    usual: float | None = None
    """What accept_length was: of the best rollout, less what its age takes off."""
    window: float = 0.0
    """Of the last rollout with drafts of the draft model."""
    share: float = 0.0
    """Of the rounds, in the last rollout; see `Drafted`."""
    log_gains: list[float] = field(default_factory=list)
    """log(accept_length after / before) of the recent refreshes that were judged."""
    refreshes: int = 0
    """So far, with the whole learning rate."""
    steps_since: int = 0
    """Rollouts since the last refresh."""

    def rollout(self, drafted: Drafted | None) -> None:
        """One has ended."""
        self.steps_since += 1
        self.share = drafted.share if drafted else 0.0
        if drafted is not None:
            self.last, self.window = drafted.accept_length, drafted.window
            self.usual = max(drafted.accept_length, USUAL_DECAY * (self.usual or 0.0))

    @property
    def is_lost(self) -> bool:
        """Whether accept_length is well below what it was."""
        return self.last is not None and self.usual is not None and self.last < LOST * self.usual

    @property
    def gain(self) -> float | None:
        """accept_length after a refresh over that before it, as it may well be: the mean of the recent ones and its
        standard error, since a few prompts say little, and one that is not made says nothing. None: not known yet."""
        if len(self.log_gains) < FEW:
            return None
        return math.exp(mean(self.log_gains) + stdev(self.log_gains) / math.sqrt(len(self.log_gains)))

    def refreshed(self, before: float, after: float, *, counts: bool = True) -> None:
        """After the last rollout, and before the next. Args: overlap on responses that it did not learn from, nan where
        it is not known; whether it says what others will be worth."""
        self.refreshes, self.steps_since = self.refreshes + counts, 0
        if not counts or math.isnan(before + after):
            return
        found = math.log(accept_length(after, self.window) / accept_length(before, self.window))
        self.log_gains = [*self.log_gains, found][-RECENT:]

    def state(self) -> dict[str, Any]:
        """Of JSON types."""
        return asdict(self)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> History:
        """What `state` returned; of another version, what both know."""
        names = {known.name for known in fields(cls)}
        return cls(**{name: value for name, value in state.items() if name in names})
