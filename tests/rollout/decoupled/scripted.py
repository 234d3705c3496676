"""A continuer whose next token is a function of all tokens before it, so that any draft can be checked by itself."""

from __future__ import annotations

import time
import zlib
from collections.abc import Hashable, Sequence

from specactor.rollout.decoupled.drafter_side import Continuer, Lane

VOCABULARY = 40
WRONG = 1000
"""What a wrong token is above the script's, and the second choice above the first: the script goes on after both."""


def follower(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> int:
    """The token that the script has after these."""
    return zlib.crc32(repr((list(prompt_ids), list(output_ids))).encode()) % VOCABULARY


def script(prompt_ids: Sequence[int], output_ids: Sequence[int], count: int) -> list[int]:
    """The next tokens."""
    tokens = list(output_ids)
    for _ in range(count):
        tokens.append(follower(prompt_ids, tokens))
    return tokens[len(output_ids) :]


class Scripted(Continuer):
    """Knows what it was shown before, and checks that it is told the truth about that."""

    version = 1
    wants_runners_up = True

    def __init__(self, step_s: float = 0.0) -> None:
        self.seen: dict[Hashable, list[int]] = {}
        self.calls = 0
        self._runners_up: list[int] = []
        self._step_s = step_s

    def extend(self, lanes: Sequence[Lane]) -> list[list[int]]:
        self.calls += 1
        assert len({(lane.key, lane.branch) for lane in lanes}) == len(lanes)
        for lane in lanes:
            if lane.branch is not None:
                shown = self.seen[lane.key][: lane.branch]
                assert list(lane.tokens[: lane.branch]) == shown, "a branch of other tokens"
                assert len(lane.tokens) > lane.branch == lane.agreed
                continue
            before = self.seen.get(lane.key, [])
            assert lane.agreed <= len(before), "tokens that it was never shown"
            assert list(lane.tokens[: lane.agreed]) == before[: lane.agreed], "they have changed"
            self.seen[lane.key] = list(lane.tokens)
        time.sleep(self._step_s)
        drafts = [[follower(lane.prompt_ids, lane.tokens)] for lane in lanes]
        self._runners_up = [draft[0] + WRONG for draft in drafts]
        return drafts

    def runners_up(self) -> list[int]:
        return self._runners_up

    def forget(self, key: Hashable) -> None:
        self.seen.pop(key, None)


def slow() -> Scripted:
    """Like a model: two milliseconds per call."""
    return Scripted(step_s=0.002)
