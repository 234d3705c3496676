"""The draft methods of an engine: which of them can draft now, and what they draft.

Invariants: one that is not there, or raised too often, is not asked; a draft is at most as long as it may be, and ends
before a token that does not exist.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Protocol

from specactor.config import SpeculationConfig
from specactor.rollout.draft.counts import Figures
from specactor.rollout.draft.decision import Decision
from specactor.rollout.draft.drafter import Drafter, DraftSequence
from specactor.rollout.draft.listeners import Listeners
from specactor.rollout.draft.trees import Drafts, fitted
from specactor.rollout.draft.verification import common, existing
from specactor.rollout.planning.acceptance import AcceptanceModel
from specactor.rollout.planning.windows import OFF

NEW_WEIGHTS_WEIGHT = 0.5
"""What evidence about a drafter's acceptance is worth after its weights have changed."""
LOOK_TRIALS = 8.0
"""What earlier evidence about acceptance is worth when a look brings new."""
LISTEN_EVERY_S = 0.02
"""Between two looks, while decoding is plain, for answers of drafters elsewhere that were silent. They are asked less
often (`decoupled.tails.BEAT_EVERY_S`)."""
ABSENT = 5
"""While no drafter is there, they are looked for every 2, 4, 8, .. 2**ABSENT rounds."""


class Policy(Protocol):
    """Says what is verified, in place of measured costs: for tests and experiments. It changes speed alone."""

    def wanted(self, sequences: Sequence[DraftSequence], drafts: Drafts) -> list[dict[str, int]]:
        """Per request the draft tokens by drafter, of those that are there; several drafters: their tree."""


class Methods:
    """All of them, in order of preference."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        listeners: Listeners,
        config: SpeculationConfig,
        acceptance: Mapping[str, AcceptanceModel] | None = None,
    ) -> None:
        """Args: what is known of each, which is worth less when it drafts with new weights."""
        self.config = config
        self.vocab_size: int | None = None
        """Tokens from this one on do not exist; None: all do."""
        self.there = {drafter.name for drafter in drafters}
        """Those that work and can have drafts, as of the last `find`."""
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self._listeners = listeners
        self._acceptance = acceptance or {}
        self._versions: dict[str, int] = {}
        """Of the weights that each drafted with when it was last looked for."""
        self._missed = 0
        """Times in a row that none was there."""
        self._listen_s = float("-inf")
        """When to listen again."""

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
                self._notice(name, drafter.version)

        for name, drafter in self.drafters.items():
            self._listeners.call(drafter, look, name, drafter)
        self.there = there
        self._missed = 0 if there else self._missed + 1

    def listen(self, now_s: float) -> None:
        """In a plain round: so that drafters elsewhere which begin to answer are there when they are looked for."""
        if now_s >= self._listen_s:
            self._listen_s = now_s + LISTEN_EVERY_S
            for name, drafter in self.drafters.items():
                if drafter.drafts_ahead and name not in self.there:
                    self._listeners.call(drafter, drafter.is_there)

    def _notice(self, name: str, version: int) -> None:
        """Newer weights get a new prior."""
        if version > self._versions.setdefault(name, version) and name in self._acceptance:
            self._acceptance[name].new_version(NEW_WEIGHTS_WEIGHT)
        self._versions[name] = version

    def expects(self) -> bool:
        """Whether drafts are on their way."""
        return any(self.drafters[name].expects for name in self.there)

    def let_wait(self, names: Container[str]) -> None:
        """These alone may wait for drafts that are on their way."""
        for name, drafter in self.drafters.items():
            drafter.may_wait = name in names

    def first(self, sequences: Sequence[DraftSequence], windows: Sequence[int], *, ahead: bool | None = None) -> Drafts:
        """Of all drafters that draft first and work; of those alone that draft ahead, or of the others alone, if
        `ahead` says so."""
        return {
            name: self.draft(name, sequences, windows)
            for name, drafter in self.drafters.items()
            if drafter.drafts_first and ahead in (None, drafter.drafts_ahead) and name in self.there
        }

    def hindsight(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> Drafts:
        """What drafters over text would have drafted some tokens ago; what was emitted since shows how good it is.

        Earlier evidence counts little beside it: much of it is of other requests.
        """
        ends = [len(sequence.output_ids) for sequence in sequences]
        with self._listeners.earlier(sequences, self.config.max_window):
            starts = [len(sequence.output_ids) for sequence in sequences]
            asked = [min(w, end - start) for w, start, end in zip(windows, starts, ends, strict=True)]
            drafts = self.first(sequences, asked, ahead=False)
        for name, lists in drafts.items():
            model = self._acceptance[name]
            model.limit(LOOK_TRIALS)
            for sequence, start, window, draft in zip(sequences, starts, asked, lists, strict=True):
                agreed = common(draft, sequence.output_ids[start : start + window])
                sure = model.told(sequence.request_id)
                model.observe(sequence.request_id, len(draft), agreed, asked=window, confidence=sure)
        return drafts

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

    def wanted(
        self, policy: Policy, sequences: Sequence[DraftSequence], windows: Sequence[int], max_branches: int
    ) -> tuple[Drafts, Decision]:
        """(what all that draft first have, what of it the policy wants)"""
        drafts = self.first(sequences, windows)
        wanted = policy.wanted(sequences, drafts)
        parts = {n: [d[: of.get(n, 0)] for d, of in zip(lists, wanted, strict=True)] for n, lists in drafts.items()}
        held = fitted(parts, max_tokens=self.config.max_window, max_branches=max_branches)
        totals = [sum(len(lists[i]) for lists in held.values()) for i in range(len(windows))]
        decision = Decision(drafter=OFF, windows=totals, depth=max(windows), drafts=[[] for _ in windows])
        decision.take(held)
        return drafts, decision

    def draft(self, name: str, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        """Of one drafter, for each request at most `windows[i]` tokens."""
        drafts: list[list[int]] = [[] for _ in sequences]
        drafter = self.drafters[name]

        def ask() -> None:
            proposed = zip(drafter.propose(sequences, windows), windows, strict=True)
            drafts[:] = [existing(list(draft[:window]), self.vocab_size) for draft, window in proposed]
            if name in self._acceptance:
                self._acceptance[name].tell([sequence.request_id for sequence in sequences], drafter.confidence)

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
