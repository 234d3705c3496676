"""A draft method that drafts nothing; engines that load it wait for drafts in the first rounds of each request: however
busy the machine is, some drafts of woken drafters are verified."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from specactor.rollout.decoupled.remote_drafter import Decoupled
from specactor.rollout.speculation.drafter import Drafter, DraftSequence

ROUNDS = 8
LIMIT_S = 2.0


class Nothing(Drafter):
    name = "nothing"

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return [[] for _ in sequences]


def waits() -> Nothing:
    proposes = Decoupled.propose
    rounds = Counter[str]()

    def propose(self: Decoupled, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        drafts = proposes(self, sequences, windows)
        names = [sequence.request_id for sequence in sequences]
        deadline = time.monotonic() + LIMIT_S
        while min(rounds[name] for name in names) < ROUNDS and not any(drafts) and time.monotonic() < deadline:
            time.sleep(0.005)
            drafts = proposes(self, sequences, windows)
        rounds.update(names)
        return drafts

    Decoupled.propose = propose  # type: ignore[method-assign]
    return Nothing()
