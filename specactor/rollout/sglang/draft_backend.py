"""The draft model of a drafter process, for many engines' requests in one batch.

Invariants: those of `draft_runner`. There is room for what `drafter_side` mirrors, by its bound; what has none in spite
of it is not drafted for.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specactor.rollout.decoupled.drafter_side import Continuer, Lane
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.sglang.draft_runner import DraftRunner, DraftText, SequenceCache, load_alone
from specactor.rollout.sglang.draft_slots import BLOCK_TOKENS, Slots
from specactor.weights_sync import draft_push
from specactor.weights_sync.messages import DraftWeights

BRANCH = "branch"  # begins the keys of places that branches have during a call


@dataclass(slots=True)
class _Known:
    prompt_ids: Sequence[int]
    output: int = 0  # tokens of it
    cache: SequenceCache = field(default_factory=SequenceCache)


class DraftBackend(Continuer):
    runner_type = DraftRunner

    def __init__(self, runner: Any) -> None:
        self._runner = self.runner_type(runner)
        self.wants_runners_up = True
        self._runners_up: list[int | None] = []
        self._slots = Slots(num_slots=self._runner.num_slots, num_rows=self._runner.num_rows)
        self._known: dict[Hashable, _Known] = {}

    @classmethod
    def start(cls, spec: DrafterSpec) -> DraftBackend:
        runner = load_alone(
            spec.model_dir,
            dtype=spec.dtype,
            max_tokens=spec.kv_tokens and spec.kv_tokens + spec.max_requests * BLOCK_TOKENS,
            max_requests=spec.max_requests,
            context_length=spec.context_length,
            memory_fraction=spec.memory_fraction,
            random_seed=spec.random_seed,
        )
        return cls(runner)

    @property
    def max_tokens(self) -> int:
        """Return for how many tokens there is room in any case."""
        return max(1, self._runner.num_slots - self._runner.num_rows * BLOCK_TOKENS)

    def renew(self, weights: DraftWeights) -> str:
        problem = draft_push.load(self._runner.model, weights)
        if not problem:
            self.version = weights.draft_version
            for known in self._known.values():
                known.cache.cut(0)  # texts are shown to the new weights from their beginning
        return problem

    def sleep(self) -> None:
        self._runner.leave_device()

    def wake(self) -> None:
        self._runner.take_device()

    def forget(self, key: Hashable) -> None:
        self._slots.free(key)
        self._known.pop(key, None)

    def extend(self, lanes: Sequence[Lane]) -> list[list[int] | None]:
        """Draft a token for each lane; none where there is no room for it, and None where its text is not read up:
        a batch reads by one pass, however much there is, and the shortest rest first."""
        for lane in lanes:
            if lane.branch is None:
                self._meet(lane)
        answers: dict[int, list[int] | None] = {i: [] for i in range(len(lanes))}  # without room
        self._runners_up = [None] * len(lanes)
        self._runner.runners_up = [] if self.wants_runners_up else None
        placed = self._placed(lanes)
        if behind := [text for text in placed.values() if self._runner.is_behind(text)]:
            self._runner.prefill(sorted(behind, key=lambda text: text.num_unseen))
        ready = [i for i, text in placed.items() if not self._runner.is_behind(text)]
        answers |= dict.fromkeys(placed)
        drafts = self._runner.draft([placed[i] for i in ready])
        runners_up: Sequence[int | None] = (
            [None] * len(drafts) if self._runner.runners_up is None else self._runner.runners_up
        )
        for i, draft, runner_up in zip(ready, drafts, runners_up, strict=True):
            answers[i], self._runners_up[i] = draft, runner_up
        for i in range(len(lanes)):
            self._slots.free((BRANCH, i))
        return list(answers.values())

    def runners_up(self) -> list[int | None]:
        return self._runners_up

    def _meet(self, lane: Lane) -> None:
        """Find what is still seen of a text since the last call."""
        known = self._known.get(lane.key)
        if known is None or not _same(known.prompt_ids, lane.prompt_ids):
            known = self._known[lane.key] = _Known(lane.prompt_ids)
        if lane.agreed >= known.output:
            known.cache.grow(len(lane.prompt_ids) + known.output, lane.tokens[known.output :])
        else:
            known.cache.cut(len(lane.prompt_ids) + lane.agreed)
        known.output = len(lane.tokens)

    def _placed(self, lanes: Sequence[Lane]) -> dict[int, DraftText]:
        """Return the texts of lanes that have room, by index; branches last, since they read their requests' keys."""
        own = {i: self._place(lane) for i, lane in enumerate(lanes) if lane.branch is None}
        branches = {i: self._branch(i, lane) for i, lane in enumerate(lanes) if lane.branch is not None}
        return {i: text for i, text in (own | branches).items() if text is not None}

    def _branch(self, i: int, lane: Lane) -> DraftText | None:
        """Return a branch's text, which reads its request's own keys, or None."""
        assert lane.branch is not None
        known, row = self._known.get(lane.key), self._slots.row(lane.key)
        length, total = len(lane.prompt_ids) + lane.branch, len(lane.prompt_ids) + len(lane.tokens)
        if known is None or row is None or known.cache.cached < length or total > self._runner.context_length:
            return None
        if total - length > BLOCK_TOKENS or (reserved := self._slots.reserve((BRANCH, i), 1)) is None:
            return None
        own, [(_, block)] = reserved
        self._runner.share(row, own, length=length, block=block)
        return _text(lane, own, SequenceCache(cached=length))

    def _place(self, lane: Lane) -> DraftText | None:
        """Return the text in its page-table row, or None without room."""
        tokens = len(lane.prompt_ids) + len(lane.tokens)
        if tokens > self._runner.context_length or (reserved := self._slots.reserve(lane.key, tokens)) is None:
            return None
        row, new_blocks = reserved
        for index, block in new_blocks:
            self._runner.place(row, index * BLOCK_TOKENS, block)
        return _text(lane, row, self._known[lane.key].cache)


def _text(lane: Lane, row: int, cache: SequenceCache) -> DraftText:
    return DraftText(
        prompt_ids=lane.prompt_ids,
        output_ids=lane.tokens,
        seed=lane.seed,
        temperature=lane.temperature,
        window=1,
        row=row,
        cache=cache,
    )


def _same(one: Sequence[int], other: Sequence[int]) -> bool:
    return one is other or list(one) == list(other)
