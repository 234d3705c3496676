"""Decides, round by round, what is drafted for which request, and remembers what became of it.

Invariant: only the past is used. `propose` sees what `learn` was told of earlier rounds, never the round's own outcome.
Clocks are passed in, so that a simulator can be in the engine's place.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Sequence

from specactor.config import SpeculationConfig
from specactor.errors import ConfigError
from specactor.rollout.draft.counts import Counts
from specactor.rollout.draft.drafter import Drafter, DraftSequence

_LOG = logging.getLogger(__name__)


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
        self.counts: dict[str, Counts] = {drafter.name: Counts() for drafter in drafters}
        self._clock = clock
        self._current = drafters[0].name
        self._draft_s = 0.0

    def open(self, sequence: DraftSequence) -> None:
        for drafter in self.drafters.values():
            self._guarded(drafter, lambda d=drafter: d.open(sequence))  # type: ignore[misc]

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:
        for drafter in self.drafters.values():
            self._guarded(drafter, lambda d=drafter: d.commit(sequence, tokens))  # type: ignore[misc]

    def close(self, sequence: DraftSequence) -> None:
        for drafter in self.drafters.values():
            self._guarded(drafter, lambda d=drafter: d.close(sequence))  # type: ignore[misc]

    def policy_changed(self) -> None:
        for drafter in self.drafters.values():
            self._guarded(drafter, drafter.policy_changed)

    def propose(self, sequences: Sequence[DraftSequence], limits: Sequence[int]) -> list[list[int]]:
        """Draft tokens for every request, at most `limits[i]`; none where verifying would not pay."""
        started = self._clock()
        drafter = self.drafters[self._current]
        windows = [max(0, min(limit, self._window())) for limit in limits]
        drafts: list[list[int]] = [[] for _ in sequences]
        if any(windows):
            self._guarded(drafter, lambda: drafts.__setitem__(slice(None), drafter.propose(sequences, windows)))
        self._draft_s = self._clock() - started
        return [list(draft[:window]) for draft, window in zip(drafts, windows, strict=True)]

    def learn(
        self, sequences: Sequence[DraftSequence], drafted: Sequence[int], accepted: Sequence[int], *, verify_s: float
    ) -> None:
        """What became of the drafts of the last `propose`."""
        counts = self.counts[self._current]
        counts.rounds += 1
        counts.draft_s += self._draft_s
        if not any(drafted):
            counts.plain_s += verify_s
            return
        counts.speculative_rounds += 1
        counts.verify_s += verify_s
        for of_draft, of_accepted in zip(drafted, accepted, strict=True):
            counts.add(of_draft, of_accepted)

    def report(self) -> dict[str, Counts]:
        """Counts per drafter since the last report."""
        report, self.counts = self.counts, {name: Counts() for name in self.counts}
        return report

    def _window(self) -> int:
        return self.config.max_window if self.config.window is None else self.config.window

    def _guarded(self, drafter: Drafter, action: Callable[[], object]) -> None:
        """A drafter that raises costs its drafts and no more."""
        try:
            action()
        except Exception:
            self.counts[drafter.name].failures += 1
            if self.counts[drafter.name].failures == 1:
                _LOG.exception("drafter %s failed; its drafts are lost, nothing else", drafter.name)


def make_drafters(config: SpeculationConfig) -> list[Drafter]:
    """The drafters that a configuration names. Raises ConfigError for a name that is not known or cannot be loaded."""
    return [_make(name, config) for name in config.drafters]


def _make(name: str, config: SpeculationConfig) -> Drafter:
    module, _, attribute = name.partition(":")
    if attribute:
        try:
            found = getattr(importlib.import_module(module), attribute)()
        except (ImportError, AttributeError) as error:
            raise ConfigError.at(
                "rollout.speculation.drafters", name, "the import path of a Drafter, package.module:Class", f"{error}."
            ) from error
        if not isinstance(found, Drafter):
            raise ConfigError.at(
                "rollout.speculation.drafters", name, "a subclass of specactor.rollout.draft.drafter.Drafter", "Fix it."
            )
        return found
    match name:
        case "suffix":
            from specactor.rollout.draft.suffix import SuffixDrafter

            return SuffixDrafter(max_tokens=config.history_tokens)
        case "ngram":
            from specactor.rollout.draft.ngram import NgramDrafter

            return NgramDrafter(max_tokens=config.history_tokens)
    raise ConfigError.at(
        "rollout.speculation.drafters", name, "suffix, ngram, or package.module:Class", "Choose one of these."
    )
