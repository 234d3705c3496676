"""Model continuers with a mistake each. The script that serves them loads them by name."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

from torch import Tensor

from specactor.rollout.decoupled.continuer import Lane
from specactor.rollout.sglang.draft_backend import ModelContinuer
from specactor.weights_sync.messages import DraftWeights


class TakesTheNextNoise(ModelContinuer):
    """Noise of the position after."""

    def _sample(self, logits_BV: Tensor, lanes: Sequence[Lane], noise: Any, base_B: Tensor, depth: int) -> Tensor:
        return super()._sample(logits_BV, lanes, noise, base_B, depth + 1)


class KeepsWhatWasRolledBack(ModelContinuer):
    """Keys and values of tokens that were replaced count as those of the new ones."""

    def _meet(self, lane: Lane) -> None:
        seen = self._seen.get(lane.key)
        before = seen.cached if seen is not None else 0
        super()._meet(lane)
        self._seen[lane.key].cached = before


class SkipsTheFirstToken(ModelContinuer):
    """The prompt is shown from its second token on."""

    def _meet(self, lane: Lane) -> None:
        super()._meet(lane)
        seen = self._seen[lane.key]
        seen.cached = max(seen.cached, 1)


class SeesTheLastTokenAlone(ModelContinuer):
    """Of what came since the last call only the last token is shown."""

    def _meet(self, lane: Lane) -> None:
        known = lane.key in self._seen
        super()._meet(lane)
        if known:
            self._seen[lane.key].cached = len(lane.prompt_ids) + len(lane.tokens) - 1


class RemembersTheEvicted(ModelContinuer):
    """A text that lost its place in the pool counts as seen."""

    def _place(self, lane: Lane, asked: Collection[Hashable], in_use: Collection[Hashable]) -> int | None:
        before = dict(self._seen)
        row = super()._place(lane, asked, in_use)
        self._seen |= {key: seen for key, seen in before.items() if key not in self._seen}
        return row


class RemembersTheForgotten(ModelContinuer):
    """A key that comes back counts as the text that it was."""

    def forget(self, key: Hashable) -> None:
        self._slots.free(key)


class IsGreedy(ModelContinuer):
    """Whatever the temperature."""

    @property
    def beta(self) -> float:
        return float("inf")


class KeepsKeysOfOldWeights(ModelContinuer):
    """Keys and values that the old weights computed are read with the new ones."""

    def renew(self, weights: DraftWeights) -> str:
        before = {key: seen.cached for key, seen in self._seen.items()}
        problem = super().renew(weights)
        for key, seen in self._seen.items():
            seen.cached = before[key]
        return problem
