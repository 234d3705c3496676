"""The draft methods of an engine: which of them can draft now, and what they draft.

Invariants: one that is not there, or raised too often, is not asked; a draft is at most as long as it may be, and ends
before a token that does not exist.
"""

from __future__ import annotations

from collections.abc import Sequence

from specactor.config import SpeculationConfig
from specactor.rollout.draft.counts import Figures
from specactor.rollout.draft.decision import Decision
from specactor.rollout.draft.drafter import Drafter, DraftSequence
from specactor.rollout.draft.listeners import Listeners
from specactor.rollout.draft.trees import Drafts, fitted
from specactor.rollout.draft.verification import existing
from specactor.rollout.planning.windows import OFF

ABSENT = 5
"""While no drafter is there, they are looked for every 2, 4, 8, .. 2**ABSENT rounds."""


class Methods:
    """All of them, in order of preference."""

    def __init__(self, drafters: Sequence[Drafter], listeners: Listeners, config: SpeculationConfig) -> None:
        self.config = config
        self.vocab_size: int | None = None
        """Tokens from this one on do not exist; None: all do."""
        self.there = {drafter.name for drafter in drafters}
        """Those that work and can have drafts, as of the last `find`."""
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self._listeners = listeners
        self._missed = 0
        """Times in a row that none was there."""

    @property
    def rest(self) -> int:
        """While none is there: rounds that need not look for one."""
        return (1 << min(self._missed, ABSENT)) - 1

    def find(self) -> None:
        """Those that work and can have drafts now."""
        there: set[str] = set()

        def look(name: str, drafter: Drafter) -> None:
            if drafter.is_there():
                there.add(name)

        for name, drafter in self.drafters.items():
            self._listeners.call(drafter, look, name, drafter)
        self.there = there
        self._missed = 0 if there else self._missed + 1

    def expects(self) -> bool:
        """Whether drafts are on their way."""
        return any(self.drafters[name].expects for name in self.there)

    def first(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> Drafts:
        """Of all drafters that draft first and work."""
        return {
            name: self.draft(name, sequences, windows)
            for name, drafter in self.drafters.items()
            if drafter.drafts_first and name in self.there
        }

    def fixed(self, sequences: Sequence[DraftSequence], windows: list[int], max_branches: int) -> Decision:
        """The first drafter that has any draft, or all that draft first."""
        names = [name for name in self.drafters if name in self.there]
        if not names or not any(windows):
            return Decision(drafter=OFF, windows=[0] * len(windows), drafts=[[] for _ in windows])
        decision = Decision(drafter=names[0], windows=windows, depth=max(windows), drafts=[[] for _ in windows])
        if self.config.merge and self.drafters[names[0]].drafts_first:
            drafts = self.first(sequences, windows)
            decision.take(fitted(drafts, max_tokens=self.config.max_window, max_branches=max_branches))
            return decision
        for name in names:
            decision.drafter, decision.together = name, not self.drafters[name].drafts_first
            if decision.together:
                break
            decision.drafts = self.draft(name, sequences, windows)
            if any(decision.drafts):
                break
        else:
            decision.drafter = names[0]
        return decision

    def draft(self, name: str, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        """Of one drafter, for each request at most `windows[i]` tokens."""
        drafts: list[list[int]] = [[] for _ in sequences]
        drafter = self.drafters[name]

        def ask() -> None:
            proposed = zip(drafter.propose(sequences, windows), windows, strict=True)
            drafts[:] = [existing(list(draft[:window]), self.vocab_size) for draft, window in proposed]

        if any(windows) and self._listeners.works(name):
            self._listeners.call(drafter, ask)
        return drafts

    def figures(self) -> Figures:
        """What drafters count themselves, since the last call: of those that count anything."""
        figures: Figures = {}

        def ask(drafter: Drafter) -> None:
            if counted := drafter.figures():
                figures[drafter.name] = counted

        for drafter in self.drafters.values():
            self._listeners.call(drafter, ask, drafter)
        return figures

    def stop(self) -> None:
        """Nobody will ask again."""
        for drafter in self.drafters.values():
            self._listeners.call(drafter, drafter.stop)
