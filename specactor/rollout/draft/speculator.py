"""Decides, round by round, what is drafted for which request, and remembers what became of it.

Invariants: only the past is used: `decide` sees what `learn` was told of earlier rounds, never the round's own outcome.
A drafter that raises costs its drafts and nothing else. Whatever is decided, tokens are the target's.

Modes: with a fixed window every request gets it. Otherwise windows are those of the highest predicted speed
(`planning.windows`), from each request's past acceptance and the measured costs of rounds; in mode auto plain decoding
is among the choices, and so is every drafter. While decoding is plain, drafts are made now and then for the record and
compared with what is emitted, so that a drafter that has become good is noticed.

One rank of an engine decides. A drafter that computes on all ranks together (one that does not draft first) is only
chosen by `decide`; its drafts are then made by `draft`, on every rank with the same arguments.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specactor.config import SpeculationConfig
from specactor.errors import ConfigError
from specactor.rollout.draft.counts import Counts
from specactor.rollout.draft.drafter import Drafter, DraftSequence
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


@dataclass(kw_only=True)
class Decision:
    """What one round verifies."""

    drafter: str
    """OFF, or who drafted."""
    windows: list[int]
    """Per request, the most draft tokens to verify."""
    depth: int = 0
    """The largest window that was drafted."""
    drafts: list[list[int]]
    """Per request; at most its window."""
    together: bool = False
    """The drafts are still to be made, by `Speculator.draft`."""
    predicted_s: float = 0.0
    """Of the whole round, uncorrected; 0 where nothing is known."""
    draft_s: float = 0.0


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
        self.costs = OnlineCosts(_table(config))
        self._clock = clock
        self._current = OFF
        self._states: dict[str, _State] = {}
        self._failures = dict.fromkeys(self.drafters, 0)
        self._rounds_off = 0
        self._decision = Decision(drafter=OFF, windows=[], drafts=[])

    def open(self, sequence: DraftSequence) -> None:
        self._states[sequence.request_id] = _State(sequence)
        for drafter in self.drafters.values():
            self._guarded(drafter, lambda d=drafter: d.open(sequence))  # type: ignore[misc]

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:
        """`tokens` were appended to the sequence's output."""
        for drafter in self.drafters.values():
            self._guarded(drafter, lambda d=drafter: d.commit(sequence, tokens))  # type: ignore[misc]
        state = self._states[sequence.request_id]
        if state.look is not None and len(sequence.output_ids) >= state.look.start + state.look.asked:
            self._compare(state)

    def close(self, sequence: DraftSequence) -> None:
        del self._states[sequence.request_id]
        for acceptance in self.acceptance.values():
            acceptance.forget(sequence.request_id)
        for drafter in self.drafters.values():
            self._guarded(drafter, lambda d=drafter: d.close(sequence))  # type: ignore[misc]

    def policy_changed(self) -> None:
        for acceptance in self.acceptance.values():
            acceptance.new_version(NEW_POLICY_WEIGHT)
        for drafter in self.drafters.values():
            self._guarded(drafter, drafter.policy_changed)

    def decide(self, sequences: Sequence[DraftSequence], limits: Sequence[int]) -> Decision:
        """Drafts for the next round, at most `limits[i]` tokens for request i; none where verifying would not pay."""
        caps = [max(0, min(limit, self.config.max_window)) for limit in limits]
        if self.config.window is not None:
            self._decision = self._fixed(sequences, [min(cap, self.config.window) for cap in caps])
        elif self.costs.table is None:
            self._decision = self._fixed(
                sequences, [min(cap, self.costs.wanted(self.config.max_window)) for cap in caps]
            )
        elif self._resting():
            self._decision = Decision(drafter=OFF, windows=[0] * len(caps), drafts=[[] for _ in caps])
        else:
            self._decision = self._best(sequences, caps)
        return self._decision

    def draft(self, drafter: str, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        """The drafts of a decision that left them to all ranks; those that did not decide must call it too."""
        drafts, seconds = self._draft(drafter, sequences, windows)
        if self._decision.together:
            self._decision.drafts = drafts
            self._decision.draft_s += seconds
        return drafts

    def learn(
        self, sequences: Sequence[DraftSequence], drafted: Sequence[int], accepted: Sequence[int], *, verify_s: float
    ) -> None:
        """What became of the drafts of the last `decide`."""
        decision = self._decision
        rows = len(sequences) + sum(drafted)
        counts = self.counts[decision.drafter]
        counts.round(
            drafted, accepted, verify_s=verify_s, draft_s=decision.draft_s, predicted_s=self._corrected(decision)
        )
        self.costs.observe(
            decision.drafter,
            requests=len(sequences),
            rows=rows,
            depth=decision.depth,
            verify_s=verify_s,
            draft_s=decision.draft_s,
            predicted_s=decision.predicted_s,
        )
        if decision.drafter == OFF:
            return
        acceptance = self.acceptance[decision.drafter]
        cut = self.drafters[decision.drafter].drafts_first  # then a short draft may only have been cut by the window
        for sequence, window, of_draft, of_accepted in zip(sequences, decision.windows, drafted, accepted, strict=True):
            asked = None if cut else max(window, of_draft)
            acceptance.observe(sequence.request_id, of_draft, of_accepted, asked=asked)

    def report(self) -> dict[str, Counts]:
        """Counts per drafter, and of plain rounds, since the last report."""
        report, self.counts = self.counts, {name: Counts() for name in self.counts}
        return report

    def _fixed(self, sequences: Sequence[DraftSequence], windows: list[int]) -> Decision:
        """The first drafter that works."""
        name = next((name for name in self.drafters if self._failures[name] < FAILURES), OFF)
        if name == OFF or not any(windows):
            return Decision(drafter=OFF, windows=[0] * len(windows), drafts=[[] for _ in windows])
        decision = Decision(drafter=name, windows=windows, depth=max(windows), drafts=[[] for _ in windows])
        if self.drafters[name].drafts_first:
            decision.drafts, decision.draft_s = self._draft(name, sequences, windows)
        else:
            decision.together = True
        return decision

    def _resting(self) -> bool:
        """Whether plain decoding goes on without another look."""
        if self.config.mode != "auto" or self._current != OFF:
            return False
        self._rounds_off += 1
        return self._rounds_off % LOOK_EVERY != 0

    def _best(self, sequences: Sequence[DraftSequence], caps: list[int]) -> Decision:
        """The drafter and windows of the highest predicted speed. Drafters of text draft before the choice."""
        requests = len(sequences)
        options: dict[str, Option] = {}
        drafts: dict[str, list[list[int]]] = {}
        spent: dict[str, float] = {}
        for name, drafter in self.drafters.items():
            if self._failures[name] >= FAILURES:
                continue
            lengths: list[int] | None = None
            if drafter.drafts_first:
                drafts[name], spent[name] = self._draft(name, sequences, caps)
                lengths = [len(draft) for draft in drafts[name]]
            options[name] = Option(
                choice=self._windows(name, sequences, caps, lengths), factor=self.costs.correction.factor(name)
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
        return Decision(
            drafter=name,
            windows=windows,
            depth=max(windows if together else caps),
            drafts=[draft[:w] for draft, w in zip(drafts.get(name, [[] for _ in windows]), windows, strict=True)],
            together=together,
            predicted_s=choice.round_s / options[name].factor,
            draft_s=sum(spent.values()),
        )

    def _windows(
        self, name: str, sequences: Sequence[DraftSequence], caps: Sequence[int], lengths: Sequence[int] | None
    ) -> Choice:
        acceptance = self.acceptance[name]
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
        if any(windows) and self._failures[name] < FAILURES:
            self._guarded(drafter, lambda: drafts.__setitem__(slice(None), drafter.propose(sequences, windows)))
        drafts = [list(draft[:window]) for draft, window in zip(drafts, windows, strict=True)]
        return drafts, self._clock() - started

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


def make_drafters(config: SpeculationConfig) -> list[Drafter]:
    """The drafters that a configuration names. Raises ConfigError for a name that is not known or cannot be loaded."""
    return [_make(name, config) for name in config.drafters]


def _make(name: str, config: SpeculationConfig) -> Drafter:
    module, _, attribute = name.partition(":")
    if attribute:
        return _imported(name, module, attribute)
    match name:
        case "suffix":
            from specactor.rollout.draft.suffix import SuffixDrafter

            return SuffixDrafter(max_tokens=config.history_tokens)
        case "ngram":
            from specactor.rollout.draft.ngram import NgramDrafter

            return NgramDrafter(max_tokens=config.history_tokens)
        case "model":
            from specactor.rollout.sglang.draft_model import DraftModel

            return DraftModel(config.sharpen)
    raise ConfigError.at(
        "rollout.speculation.drafters", name, "suffix, ngram, model, or package.module:Class", "Choose one of these."
    )


def _imported(name: str, module: str, attribute: str) -> Drafter:
    try:
        found = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError.at(
            "rollout.speculation.drafters", name, "the import path of a Drafter, package.module:Class", f"{error}."
        ) from error
    if not isinstance(found, Drafter):
        raise ConfigError.at(
            "rollout.speculation.drafters", name, "a subclass of specactor.rollout.draft.drafter.Drafter", "Fix it."
        )
    return found
