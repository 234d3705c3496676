"""Several draft models in one engine: drafters for the second one, some with a mistake, and forced turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from specactor.rollout.sglang.draft_runner import DraftText, SequenceCache
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.registry import Filler
from specactor.rollout.speculation.speculator import Speculator
from specactor.rollout.speculation.verification import Decision
from tests.rollout.sglang import wrong_model_drafters
from tests.rollout.sglang.wrong_model_drafters import Shared


class Turns(Speculator):
    """Draft models draft in turns, each for two thirds of the requests; the rest has what a drafter over text has. In
    each round others."""

    rounds = 0

    def decide(self, sequences: Sequence[DraftSequence], limits: Sequence[int], *, max_branches: int = 0) -> Decision:
        windows = [max(0, min(limit, self.config.max_window)) for limit in limits]
        self.rounds += 1
        self.drafter_set.find()
        self.drafter_set.tell()
        late = [name for name, drafter in self.drafters.items() if not drafter.drafts_first]
        turns = [(self.rounds + i) % 3 for i in range(len(windows))]
        drafts = self.drafter_set.first(sequences, windows)
        self._decision = Decision(
            drafter=late[self.rounds // 3 % len(late)],
            windows=windows,
            depth=max(windows),
            drafts=[[] for _ in windows],
            beside={n: [d if t == 0 else [] for d, t in zip(of, turns, strict=True)] for n, of in drafts.items()},
            to_draft=[window if turn else 0 for window, turn in zip(windows, turns, strict=True)],
        )
        return self._decision

    @property
    def plain_rounds_ahead(self) -> int:
        return 0


def turns() -> Filler:
    """The next speculator is `Turns`."""
    right = Speculator.__init__

    def made(self: Speculator, *arguments: Any, **named: Any) -> None:
        Speculator.__init__ = right  # type: ignore[method-assign]
        right(self, *arguments, clock=time.perf_counter, **{k: v for k, v in named.items() if k != "clock"})
        self.__class__ = Turns

    Speculator.__init__ = made  # type: ignore[method-assign]
    return Filler()


_first: dict[str, SequenceCache] = {}
"""What the first draft model has seen of each text."""


class First(Shared):
    """Right: the first draft model."""

    def open(self, sequence: DraftSequence) -> None:
        super().open(sequence)
        _first[sequence.request_id] = self._caches[sequence.request_id]


class Second(Shared):
    """Right: the second draft model, with the target's own noise and temperature."""

    def __init__(self) -> None:
        super().__init__("model:2")


class TakesTheFirstsPositions(Second):
    """What the first draft model has seen counts as seen."""

    def _text(self, sequence: DraftSequence, window: int) -> DraftText:
        cache = self._caches[sequence.request_id]
        cache.cached = max(cache.cached, _first[sequence.request_id].cached)
        return super()._text(sequence, window)


class Errs(wrong_model_drafters.Errs):
    """Its drafts are rejected at every fourth position."""

    def __init__(self) -> None:
        super().__init__("model:2")


class IsNotRolledBack(wrong_model_drafters.ErrsAndKeeps):
    """The same, and keys of what was rejected count as those of the tokens that were emitted in its place."""

    def __init__(self) -> None:
        super().__init__("model:2")
