"""Backends with the target's own temperature, and of those some with a mistake each. Loaded by name."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from specactor.rollout.decoupled.drafter_side import Lane
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.sglang.draft_backend import DraftBackend
from specactor.rollout.sglang.draft_runner import DraftText
from specactor.weights_sync.messages import DraftWeights
from tests.rollout.sglang import wrong_model_drafters
from tests.rollout.sglang.wrong_model_drafters import GreedyRunner, NextNoiseRunner, SharedRunner


class Shared(DraftBackend):
    """Right: a model equal to the target drafts what the target emits."""

    runner_type = SharedRunner


def start_shared(spec: DrafterSpec) -> DraftBackend:
    return Shared.start(spec)


class ReadsSlowly(Shared):
    """Right: and so do those whose texts it has not read yet."""

    runner_type = wrong_model_drafters.ReadsSlowly.runner_type


class ReadsTooFar(Shared):
    """What did not fit in a pass counts as read."""

    runner_type = wrong_model_drafters.ReadsTooFar.runner_type


class TakesTheNextNoise(Shared):
    runner_type = NextNoiseRunner


class IsGreedy(Shared):
    """Whatever the temperature."""

    runner_type = GreedyRunner


class SharesATokenMore(Shared):
    """A branch counts a token of the request's own text as its own."""

    def _branch(self, i: int, lane: Lane) -> DraftText | None:
        text = super()._branch(i, lane)
        if text is not None:
            text.cache.cached += 1
        return text


class TellsOldRunnersUp(Shared):
    """While second choices are not wanted, those of the last call in which they were count on."""

    def extend(self, lanes: Sequence[Lane]) -> list[list[int] | None]:
        before = self._runners_up
        answers = super().extend(lanes)
        self._runners_up = self._runners_up if self.wants_runners_up else before
        return answers


class NeverTellsThemAgain(Shared):
    """Second choices that were not wanted once are not there any more."""

    def extend(self, lanes: Sequence[Lane]) -> list[list[int] | None]:
        self._wanted = getattr(self, "_wanted", True) and self.wants_runners_up
        self.wants_runners_up = self._wanted
        return super().extend(lanes)


class KeepsWhatWasRolledBack(Shared):
    """Keys and values of tokens that were replaced count as those of the new ones."""

    def _meet(self, lane: Lane) -> None:
        known = self._known.get(lane.key)
        before = known.cache.cached if known is not None else 0
        super()._meet(lane)
        self._known[lane.key].cache.cached = before


class SkipsTheFirstToken(Shared):
    """The prompt is shown from its second token on."""

    def _meet(self, lane: Lane) -> None:
        super()._meet(lane)
        cache = self._known[lane.key].cache
        cache.cached = max(cache.cached, 1)


class SeesTheLastTokenAlone(Shared):
    """Of what came since the last call only the last token is shown."""

    def _meet(self, lane: Lane) -> None:
        before = lane.key in self._known
        super()._meet(lane)
        if before:
            self._known[lane.key].cache.cached = len(lane.prompt_ids) + len(lane.tokens) - 1


class RemembersTheForgotten(Shared):
    """A key that comes back counts as the text that it was."""

    def forget(self, key: Hashable) -> None:
        self._slots.free(key)


class KeepsKeysOfOldWeights(Shared):
    """Keys and values that the old weights computed are read with the new ones."""

    def renew(self, weights: DraftWeights) -> str:
        before = {key: known.cache.cached for key, known in self._known.items()}
        problem = super().renew(weights)
        for key, known in self._known.items():
            known.cache.cached = before[key]
        return problem
