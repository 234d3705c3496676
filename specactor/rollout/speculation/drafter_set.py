"""The drafters of an engine: what each is told, and what it drafts.

Invariants: a drafter knows the text up to where it drafts from; it hears of a request in order (open, commit, close),
and of each token once; one that raises loses its drafts, and after `FAILURES` times is asked no more. Problems are
counted and logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import isfinite
from typing import Literal

from specactor.config import SpeculationConfig
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.estimates import Estimates
from specactor.rollout.speculation.verification import Decision, Drafts, common, existing
from specactor.rollout.speculation.windows import OFF

FAILURES = 3  # a drafter that raised this often is not asked again
ABSENT = 5  # while no drafter is there, one is looked for every 2, 4, 8, .. 2**ABSENT rounds

_LOG = logging.getLogger(__name__)
_Kind = Literal["text", "model"]
"""Text: learns from all requests with a prompt. Model: needs only those that it drafts for."""


@dataclass(slots=True, eq=False)
class _Request:
    sequence: DraftSequence
    known: dict[_Kind, DraftSequence] = field(default_factory=dict)
    """The copy that drafters of a kind have: it grows as they are told tokens."""


class DrafterSet:
    """All drafters of one engine, in order of preference."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        config: SpeculationConfig,
        estimates: Estimates,
        *,
        decides: bool = True,
    ) -> None:
        self.config = config
        self.vocab_size: int | None = None  # tokens from this one on do not exist; None: all do
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self.there = set(self.drafters)  # those that can have drafts, as of the last `find`
        self._by_kind: dict[_Kind, list[Drafter]] = {"text": [], "model": []}  # those that are told
        for drafter in drafters:
            if decides or not drafter.drafts_first:
                self._by_kind[_kind(drafter)].append(drafter)
        self._estimates, self._acceptance = estimates, estimates.acceptance
        self._failures = dict.fromkeys(self.drafters, 0)
        self._problems: set[str] = set()
        self._running: dict[str, _Request] = {}
        self._versions: dict[str, int] = {}  # each drafter's version, as of the last `find`
        self._missed = 0  # times in a row that none was there
        self.read_up: frozenset[int] = frozenset()  # the drafter's that drafted last

    # ------------------------------------------------------------------------------------- what drafters are told

    def open(self, sequence: DraftSequence) -> None:
        self._running[sequence.request_id] = _Request(sequence)

    def close(self, sequence: DraftSequence) -> None:
        request = self._running.pop(sequence.request_id)
        self._tell([request], "text")
        if "model" in request.known:
            self._tell([request], "model")
        for kind, known in request.known.items():
            for drafter in self._by_kind[kind]:
                self.call(drafter, drafter.close, known)

    def tell(self, sequences: Iterable[DraftSequence] | None = None) -> None:
        """Tell drafters over text of all requests, and others of `sequences` (None: all), which may be drafted for."""
        self._tell(self._running.values(), "text")
        asked = self._running if sequences is None else [sequence.request_id for sequence in sequences]
        self._tell([self._running[request_id] for request_id in asked], "model")

    def policy_changed(self) -> None:
        for drafter in chain(*self._by_kind.values()):
            self.call(drafter, drafter.policy_changed)

    def _tell(self, requests: Iterable[_Request], kind: _Kind, *, but: int = 0) -> None:
        """Tell drafters what they do not know of these requests, but for the last `but` tokens."""
        drafters = self._by_kind[kind]
        for request in requests if drafters else ():
            known = request.known.get(kind)
            if known is None:
                known = request.known[kind] = replace(request.sequence, output_ids=[])
                for drafter in drafters:
                    self.call(drafter, drafter.open, known)
            output, has = request.sequence.output_ids, known.output_ids
            if len(has) < len(output) - but:
                fresh = output[len(has) : len(output) - but]
                has += fresh
                for drafter in drafters:
                    if self._failures[drafter.name] < FAILURES:
                        try:
                            drafter.commit(known, fresh)
                        except Exception as error:
                            self._count_failure(drafter, error)

    # --------------------------------------------------------------------------------------------- who can draft

    @property
    def plain_rounds_ahead(self) -> int:
        """Rounds that need not look for drafters, while none is there."""
        return (1 << min(self._missed, ABSENT)) - 1

    def find(self) -> None:
        there: set[str] = set()
        asked: set[str] = set()

        def look(name: str, drafter: Drafter) -> None:
            if drafter.is_there():
                there.add(name)
                version = drafter.version
                if version > self._versions.setdefault(name, version):
                    self._acceptance[name].new_version()
                self._versions[name] = version
            elif drafter.expects:
                asked.add(name)

        for name, drafter in self.drafters.items():
            self.call(drafter, look, name, drafter)
        self.there = there
        # An answer would lie until the next look, for up to 2**ABSENT rounds: the next is in the next round.
        self._missed = 0 if there or asked else self._missed + 1

    def expects(self) -> bool:
        return any(self.drafters[name].expects for name in self.there)

    # ------------------------------------------------------------------------------------------------ what is drafted

    def draft(self, name: str, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sequences]
        drafter, self.read_up = self.drafters[name], frozenset()
        if not any(windows) or self._failures[name] >= FAILURES:
            return drafts
        known = [self._running[sequence.request_id].known[_kind(drafter)] for sequence in sequences]

        def ask() -> None:
            proposed = drafter.propose(known, windows)
            if len(proposed) != len(windows):
                raise ValueError(f"propose returned {len(proposed)} drafts for {len(windows)} requests")
            usable = self._usable(drafter, [list(d[:w]) for d, w in zip(proposed, windows, strict=True)], proposed)
            self._acceptance[name].tell([sequence.request_id for sequence in sequences], drafter.confidence)
            self.read_up = frozenset(drafter.read_up)
            drafts[:] = usable  # last: whatever of it is wrong costs the drafts

        self.call(drafter, ask)
        return drafts

    def first(self, sequences: Sequence[DraftSequence], windows: Sequence[int], *, ahead: int | None = None) -> Drafts:
        """Return drafts of those that draft first; of those ahead, for the first `ahead` requests."""
        found: Drafts = {}
        for name, drafter in self.drafters.items():
            if drafter.drafts_first and name in self.there:
                some = ahead if drafter.drafts_ahead else None
                found[name] = self.draft(name, sequences[:some], windows[:some])
        return found

    def hindsight(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> None:
        """Learn from what drafters over text draft from some tokens ago, before they hear of those since."""
        requests = [self._running[sequence.request_id] for sequence in sequences]
        self._tell(requests, "text", but=self.config.max_window)
        for name in [drafter.name for drafter in self._by_kind["text"] if drafter.name in self.there]:
            starts = [len(request.known["text"].output_ids) for request in requests]
            since = [sequence.output_ids[start:] for sequence, start in zip(sequences, starts, strict=True)]
            asked = [min(window, len(tokens)) for window, tokens in zip(windows, since, strict=True)]
            drafts = self.draft(name, sequences, asked)
            model = self._acceptance[name]
            model.limit()  # much of the earlier evidence is of other requests
            agreed = [common(draft, emitted) for draft, emitted in zip(drafts, since, strict=True)]
            ids = [sequence.request_id for sequence in sequences]
            model.observe_all(ids, [*map(len, drafts)], agreed, asked=asked)

    def fixed(self, sequences: Sequence[DraftSequence], windows: list[int], *, turn: int = 0) -> Decision:
        """The first drafter that has any draft; in turn 1 the second is asked first, and so on."""
        names = [name for name in self.drafters if name in self.there]
        if not names or not any(windows):
            return Decision(drafter=OFF, windows=[0] * len(windows), drafts=[[] for _ in windows])
        names = names[turn % len(names) :] + names[: turn % len(names)]
        decision = Decision(drafter=names[0], windows=windows, depth=max(windows), drafts=[[] for _ in windows])
        for name in names:
            decision.drafter = name
            if not self.drafters[name].drafts_first:
                decision.to_draft = windows
                break
            decision.drafts = self.draft(name, sequences, windows)
            if any(decision.drafts):
                break
        else:
            decision.drafter = names[0]
        return decision

    def note_figures(self) -> None:
        """Add what drafters counted themselves to their counts."""

        def ask(drafter: Drafter) -> None:
            found = {str(name): float(value) for name, value in drafter.figures().items()}
            kept = {name: value for name, value in found.items() if isfinite(value)}
            self._estimates.counts[drafter.name].figures = kept

        for drafter in self.drafters.values():
            self.call(drafter, ask, drafter)

    def stop(self) -> None:
        for drafter in self.drafters.values():
            self.call(drafter, drafter.stop)

    # ------------------------------------------------------------------------------------------- what goes wrong

    def num_failures(self, name: str) -> int:
        """Return how often a drafter raised."""
        return self._failures[name]

    def call(self, drafter: Drafter, action: Callable[..., object], *args: object) -> None:
        """Call a drafter, which loses its drafts if it raises."""
        name = drafter.name
        if self._failures[name] >= FAILURES:
            return
        try:
            action(*args)
        except Exception as error:
            self._count_failure(drafter, error)

    def _count_failure(self, drafter: Drafter, error: Exception) -> None:
        name = drafter.name
        self._failures[name] += 1
        self._estimates.counts[name].failures += 1
        _LOG.error("drafter %s failed (%d of %d)", name, self._failures[name], FAILURES, exc_info=error)
        if self._failures[name] == 1:
            first_line = str(error).partition("\n")[0]
            self._tell_problem(drafter, f"{type(error).__name__}: {first_line}"[:200])
        if self._failures[name] == FAILURES:
            self._tell_problem(drafter, f"failed {FAILURES} times, and is not asked again")

    def _usable(self, drafter: Drafter, drafts: list[list[int]], proposed: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return what may be verified of drafts, which are the `proposed` ones, cut."""
        tokens = list(chain.from_iterable(drafts))
        if sum(map(len, proposed)) == len(tokens) and existing(tokens, self.vocab_size) is tokens:
            return drafts
        usable = [existing(draft, self.vocab_size) for draft in drafts]
        for whole, draft, kept in zip(proposed, drafts, usable, strict=True):
            self._estimates.counts[drafter.name].cut_drafts += len(kept) < len(whole)
            if len(whole) > len(draft):
                self._tell_problem(drafter, "drafted more tokens than it was asked for; they are cut")
            if len(kept) < len(draft):
                self._tell_problem(drafter, f"drafted {_what(draft[len(kept)])}; the draft ends before it")
        return usable

    def _tell_problem(self, drafter: Drafter, reason: str) -> None:
        problem = f"{type(drafter).__name__}: {reason}"
        if problem not in self._problems:
            self._problems.add(problem)
            self._estimates.counts[drafter.name].problems.append(problem)
            _LOG.warning("drafter %s: %s", drafter.name, problem)


def _kind(drafter: Drafter) -> _Kind:
    return "text" if drafter.drafts_first and not drafter.drafts_ahead else "model"


def _what(token: object) -> str:
    """Say what is wrong with a token, alike for all such: a problem is logged once."""
    if not isinstance(token, int):
        return f"a {type(token).__name__}, which is no token"
    return "a negative token" if token < 0 else "a token beyond the vocabulary"
