"""Decides, round by round, what is drafted for which request, and remembers what became of it.

Invariants: only the past is used: `decide` sees what `learn` was told of earlier rounds, never the round's own outcome.
A drafter that raises costs its drafts and nothing else. Whatever is decided, tokens are the target's.

Modes: with a fixed window every request gets it. Otherwise windows are those of the highest predicted speed
(`planning.windows`), from each request's past acceptance and the measured costs of rounds; in mode auto plain decoding
is among the choices, and so is every drafter. While decoding is plain, drafts are made now and then for the record and
compared with what is emitted, so that a drafter that has become good is noticed.

With `merge`, the drafters that draft first propose together: what they draft for a request is one tree (`trees`). The
first of them that drafted anything leads the round.

One rank of an engine decides. A drafter that computes on all ranks together (one that does not draft first) is only
chosen by `decide`; its drafts are then made by `draft`, on every rank with the same arguments.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from specactor.config import SpeculationConfig
from specactor.rollout.draft.counts import Counts
from specactor.rollout.draft.decision import Decision
from specactor.rollout.draft.drafter import Drafter, DraftSequence
from specactor.rollout.draft.trees import Candidates, Drafts, Merging, fitted
from specactor.rollout.draft.verification import credits_of
from specactor.rollout.planning.acceptance import AcceptanceModel
from specactor.rollout.planning.costs import CostTable
from specactor.rollout.planning.online_costs import OnlineCosts
from specactor.rollout.planning.windows import OFF, Choice, Option, choose, choose_windows

LOOK_EVERY = 16
"""Rounds of plain decoding between two looks at what drafting would bring."""
NEW_POLICY_WEIGHT = 0.5
"""What evidence about acceptance is worth after the policy has changed."""
FAILURES = 3
"""A drafter that raised this often is not asked again."""

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Look:
    """A draft that is not verified but compared with what is emitted later."""

    drafter: str
    start: int
    tokens: list[int]
    asked: int


@dataclass(slots=True)
class _State:
    """Of a running request."""

    sequence: DraftSequence
    told: int
    """Tokens of its output that the drafters know."""
    look: _Look | None = field(default=None)


class Speculator:
    """All draft methods of one engine."""

    def __init__(
        self,
        config: SpeculationConfig,
        drafters: Sequence[Drafter],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self.counts: dict[str, Counts] = {name: Counts() for name in (OFF, *self.drafters)}
        self.acceptance = {name: AcceptanceModel(max_window=config.max_window) for name in self.drafters}
        self.merging = Merging(list(self.drafters), max_window=config.max_window)
        self.vocab_size: int | None = None
        """Tokens from this one on do not exist; None: all do. Drafts end before one that does not."""
        self.costs = OnlineCosts(_table(config))
        self._clock = clock
        self._current = OFF
        self._states: dict[str, _State] = {}
        self._failures = dict.fromkeys(self.drafters, 0)
        self._rounds_off = 0
        self._at_rest = False
        self._decision = Decision(drafter=OFF, windows=[], drafts=[])

    def open(self, sequence: DraftSequence) -> None:
        self._states[sequence.request_id] = _State(sequence, told=len(sequence.output_ids))
        for drafter in self.drafters.values():
            self._guarded(drafter, lambda d=drafter: d.open(sequence))  # type: ignore[misc]

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:
        """`tokens` were appended to the sequence's output. While decoding is plain, drafters are told later, and of
        many tokens at once."""
        if not self._at_rest:
            self._tell(self._states[sequence.request_id])
        state = self._states[sequence.request_id]
        if state.look is not None and len(sequence.output_ids) >= state.look.start + state.look.asked:
            self._compare(state)

    def close(self, sequence: DraftSequence) -> None:
        self._tell(self._states[sequence.request_id])
        del self._states[sequence.request_id]
        for acceptance in self.acceptance.values():
            acceptance.forget(sequence.request_id)
        self.merging.forget(sequence.request_id)
        for drafter in self.drafters.values():
            self._guarded(drafter, lambda d=drafter: d.close(sequence))  # type: ignore[misc]

    def policy_changed(self) -> None:
        for acceptance in self.acceptance.values():
            acceptance.new_version(NEW_POLICY_WEIGHT)
        self.merging.new_version(NEW_POLICY_WEIGHT)
        for drafter in self.drafters.values():
            self._guarded(drafter, drafter.policy_changed)

    def decide(self, sequences: Sequence[DraftSequence], limits: Sequence[int], *, max_branches: int = 0) -> Decision:
        """Drafts for the next round, of at most `limits[i]` tokens for request i; none where verifying would not pay.

        `max_branches`: of all trees together; with none, trees are chains.
        """
        caps = [max(0, min(limit, self.config.max_window)) for limit in limits]
        if self.config.window is not None:
            self._decision = self._fixed(sequences, [min(cap, self.config.window) for cap in caps], max_branches)
        elif self.costs.table is None:
            self._decision = self._fixed(
                sequences, [min(cap, self.costs.wanted(self.config.max_window)) for cap in caps], max_branches
            )
        elif self._resting():
            self._at_rest = True
            self._decision = Decision(drafter=OFF, windows=[0] * len(caps), drafts=[[] for _ in caps])
        else:
            self._wake()
            self._decision = self._best(sequences, caps, max_branches)
        return self._decision

    def draft(self, drafter: str, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        """The drafts of a decision that left them to all ranks; those that did not decide must call it too."""
        drafts, seconds = self._draft(drafter, sequences, windows)
        if self._decision.together:
            self._decision.drafts = drafts
            self._decision.draft_s += seconds
        return drafts

    def learn(self, sequences: Sequence[DraftSequence], accepted: Sequence[Sequence[int]], *, verify_s: float) -> None:
        """What became of the drafts of the last `decide`: per request, the draft tokens that were accepted."""
        decision = self._decision
        names = [decision.drafter, *decision.beside]
        every = list(zip(decision.drafts, *decision.beside.values(), strict=True))
        credits = [credits_of(drafts, right) for drafts, right in zip(every, accepted, strict=True)]
        self.counts[decision.drafter].round(
            [own.drafted for own, *_ in credits],
            [own.accepted for own, *_ in credits],
            verify_s=verify_s,
            draft_s=decision.draft_s,
            predicted_s=self._corrected(decision),
        )
        for own in credits:
            for name, credit in zip(names[1:], own[1:], strict=True):
                self.counts[name].beside(credit.first, credit.drafted, credit.accepted)
        self.costs.observe(
            decision.drafter,
            requests=len(sequences),
            rows=len(sequences) + sum(credit.drafted for own in credits for credit in own),
            depth=decision.depth,
            verify_s=verify_s,
            draft_s=decision.draft_s,
            predicted_s=decision.predicted_s,
        )
        if decision.drafter == OFF:
            return
        cut = self.drafters[decision.drafter].drafts_first  # then a short draft may only have been cut by the window
        for i, sequence in enumerate(sequences):
            for name, draft, credit in zip(names, every[i], credits[i], strict=True):
                asked = None if cut else max(decision.windows[i], len(draft))
                self.acceptance[name].observe(sequence.request_id, len(draft), credit.agreed, asked=asked)
            if decision.beside:
                self.merging.learn(sequence.request_id, dict(zip(names, credits[i], strict=True)))

    def report(self) -> dict[str, Counts]:
        """Counts per drafter, and of plain rounds, since the last report."""
        report, self.counts = self.counts, {name: Counts() for name in self.counts}
        return report

    def _fixed(self, sequences: Sequence[DraftSequence], windows: list[int], max_branches: int) -> Decision:
        """The first drafter that works, or all that draft first."""
        name = next((name for name in self.drafters if self._failures[name] < FAILURES), OFF)
        if name == OFF or not any(windows):
            return Decision(drafter=OFF, windows=[0] * len(windows), drafts=[[] for _ in windows])
        decision = Decision(drafter=name, windows=windows, depth=max(windows), drafts=[[] for _ in windows])
        if not self.drafters[name].drafts_first:
            decision.together = True
        elif self.config.merge:
            drafts, spent = self._first_drafts(sequences, windows)
            decision.take(fitted(drafts, max_tokens=self.config.max_window, max_branches=max_branches))
            decision.draft_s = sum(spent.values())
        else:
            decision.drafts, decision.draft_s = self._draft(name, sequences, windows)
        return decision

    def _first_drafts(
        self, sequences: Sequence[DraftSequence], windows: Sequence[int]
    ) -> tuple[Drafts, dict[str, float]]:
        """(drafts, seconds) of all drafters that draft first and work."""
        drafts: Drafts = {}
        spent: dict[str, float] = {}
        for name, drafter in self.drafters.items():
            if drafter.drafts_first and self._failures[name] < FAILURES:
                drafts[name], spent[name] = self._draft(name, sequences, windows)
        return drafts, spent

    def _tell(self, state: _State) -> None:
        """The drafters get what was committed since they were told."""
        sequence, tokens = state.sequence, state.sequence.output_ids[state.told :]
        state.told = len(sequence.output_ids)
        if tokens:
            for drafter in self.drafters.values():
                self._guarded(drafter, lambda d=drafter: d.commit(sequence, tokens))  # type: ignore[misc]

    def _wake(self) -> None:
        """Drafters are about to be asked again."""
        if self._at_rest:
            self._at_rest = False
            for state in self._states.values():
                self._tell(state)

    def _resting(self) -> bool:
        """Whether plain decoding goes on without another look."""
        if self.config.mode != "auto" or self._current != OFF:
            return False
        self._rounds_off += 1
        return self._rounds_off % LOOK_EVERY != 0

    def _best(self, sequences: Sequence[DraftSequence], caps: list[int], max_branches: int) -> Decision:
        """The drafter and windows of the highest predicted speed. Drafters of text draft before the choice."""
        requests = len(sequences)
        drafts, spent = self._first_drafts(sequences, caps)
        options = {
            name: Option(
                choice=self._windows(name, sequences, caps, drafts.get(name)), factor=self.costs.correction.factor(name)
            )
            for name in self.drafters
            if self._failures[name] < FAILURES and not (self.config.merge and name in drafts)
        }
        trees = self._tree_candidates(sequences, drafts, max_branches) if self.config.merge else None
        if trees is not None:
            lead = next(iter(trees.drafts))
            options[lead] = Option(
                choice=self._tree_sizes(trees, caps, spent), factor=self.costs.correction.factor(lead)
            )
        choice = self._choose(options, requests)
        name = choice.drafter
        if name == OFF:
            self._look(sequences, drafts, caps)
            return Decision(
                drafter=OFF,
                windows=[0] * requests,
                drafts=[[] for _ in sequences],
                predicted_s=self.costs.verify_s(requests, requests),
                draft_s=sum(spent.values()),
            )
        windows = list(choice.windows)
        together = name not in drafts
        decision = Decision(
            drafter=name,
            windows=windows,
            depth=max(windows if together else caps),
            drafts=[draft[:w] for draft, w in zip(drafts.get(name, [[] for _ in windows]), windows, strict=True)],
            together=together,
            predicted_s=choice.round_s / options[name].factor,
            draft_s=sum(spent.values()),
        )
        if trees is not None and not together:
            decision.take(trees.chosen(windows))
        return decision

    def _tree_candidates(
        self, sequences: Sequence[DraftSequence], drafts: Drafts, max_branches: int
    ) -> Candidates | None:
        """None where nothing was drafted."""
        ids = [sequence.request_id for sequence in sequences]
        trees = self.merging.candidates(ids, drafts, self.acceptance, max_branches=max_branches)
        return trees if trees.drafts else None

    def _tree_sizes(self, trees: Candidates, caps: Sequence[int], spent: Mapping[str, float]) -> Choice:
        """Draft tokens of each request's tree."""
        draft_s = sum(self.costs.draft_s(name, len(caps))(max(caps)) for name in spent)
        return choose_windows(
            trees.survivals,
            verify_s=self.costs.verify_s,
            draft_s=lambda depth: draft_s,
            max_window=self.config.max_window,
        )

    def _windows(
        self, name: str, sequences: Sequence[DraftSequence], caps: Sequence[int], drafts: list[list[int]] | None
    ) -> Choice:
        """Of one drafter. `drafts`: if they are there already."""
        acceptance = self.acceptance[name]
        lengths = None if drafts is None else [len(draft) for draft in drafts]
        survivals = [
            acceptance.survival(s.request_id, cap, drafted=None if lengths is None else lengths[i])
            for i, (s, cap) in enumerate(zip(sequences, caps, strict=True))
        ]
        draft_s = self.costs.draft_s(name, len(sequences))
        if lengths is not None:
            spent_s = draft_s(max(caps))
            draft_s = lambda depth: spent_s  # noqa: E731
        return choose_windows(survivals, verify_s=self.costs.verify_s, draft_s=draft_s, max_window=max(caps))

    def _choose(self, options: dict[str, Option], requests: int) -> Choice:
        # In mode coupled drafting is wanted, and plain decoding is no choice.
        plain_s = self.costs.plain_s(requests) if self.config.mode == "auto" or not options else float("inf")
        choice = choose(options, requests=requests, plain_s=plain_s, current=self._current)
        if choice.drafter != self._current:
            _LOG.info("speculation: %s", choice.reason)
        self._current = choice.drafter
        return choice

    def _look(
        self, sequences: Sequence[DraftSequence], drafts: dict[str, list[list[int]]], caps: Sequence[int]
    ) -> None:
        """Keep what was drafted and not verified, for comparison."""
        for name, of_drafter in drafts.items():
            for sequence, draft, cap in zip(sequences, of_drafter, caps, strict=True):
                state = self._states[sequence.request_id]
                if cap and state.look is None:
                    state.look = _Look(name, len(sequence.output_ids), draft, cap)

    def _compare(self, state: _State) -> None:
        look, state.look = state.look, None
        assert look is not None
        emitted = state.sequence.output_ids[look.start : look.start + len(look.tokens)]
        accepted = next((j for j, (a, b) in enumerate(zip(look.tokens, emitted, strict=True)) if a != b), len(emitted))
        self.acceptance[look.drafter].observe(
            state.sequence.request_id, len(look.tokens), accepted, asked=max(look.asked, len(look.tokens))
        )

    def _draft(
        self, name: str, sequences: Sequence[DraftSequence], windows: Sequence[int]
    ) -> tuple[list[list[int]], float]:
        """(drafts, seconds)"""
        started = self._clock()
        drafts: list[list[int]] = [[] for _ in sequences]
        drafter = self.drafters[name]

        def ask() -> None:
            proposed = zip(drafter.propose(sequences, windows), windows, strict=True)
            drafts[:] = [list(takewhile(self._exists, draft[:window])) for draft, window in proposed]

        if any(windows) and self._failures[name] < FAILURES:
            self._guarded(drafter, ask)
        return drafts, self._clock() - started

    def _exists(self, token: int) -> bool:
        return token >= 0 and (self.vocab_size is None or token < self.vocab_size)

    def _corrected(self, decision: Decision) -> float:
        return decision.predicted_s * self.costs.correction.factor(decision.drafter)

    def _guarded(self, drafter: Drafter, action: Callable[[], object]) -> None:
        """A drafter that raises costs its drafts and no more."""
        if self._failures[drafter.name] >= FAILURES:
            return
        try:
            action()
        except Exception:
            self.counts[drafter.name].failures += 1
            self._failures[drafter.name] += 1
            _LOG.exception(
                "drafter %s failed (%d of %d); its drafts are lost, nothing else",
                drafter.name,
                self._failures[drafter.name],
                FAILURES,
            )


def _table(config: SpeculationConfig) -> CostTable | None:
    return CostTable.from_json(Path(config.cost_table).read_bytes()) if config.cost_table else None
