"""A draft method that drafts nothing; engines that load it wait for drafts in the first rounds of each request: however
busy the machine is, some drafts of woken drafters are verified."""

from __future__ import annotations

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
    pays = Decoupled._wait_for
    rounds = Counter[str]()

    def wait_for(self: Decoupled, names: Sequence[str], windows: Sequence[int], drafts: list[list[int]]) -> float:
        if min(rounds[name] for name in names) < ROUNDS:
            rounds.update(names)
            self.patience.bound = lambda requests, missing: (LIMIT_S, float(missing))  # type: ignore[method-assign]
        else:
            vars(self.patience).pop("bound", None)
        return pays(self, names, windows, drafts)

    Decoupled._wait_for = wait_for  # type: ignore[method-assign]
    return Nothing()
