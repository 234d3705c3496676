"""A drafter process that recites what requests emitted before, or misbehaves. No torch here: it starts in a second.

Its folder, the drafter's `model_dir`, is written by the test: the texts, and the manner, which may change at any time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from specactor.rollout.decoupled.drafter_side import Continuer, Lane
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.types import RolloutRequest, Trajectory

TEXTS = "texts.json"
MANNER = "manner"
EOS = 1
WRONG_EVERY = 5
SHIFT = 3
"""Positions by which stale and future drafts are off."""


class Texts:
    """What requests emitted, by prompt and seed."""

    def __init__(self, folder: Path) -> None:
        self._texts = {
            (tuple(prompt), seed): text for prompt, seed, text in json.loads((folder / TEXTS).read_text() or "[]")
        }

    def after(self, prompt_ids: Sequence[int], seed: int, position: int, count: int) -> list[int]:
        """At most `count` tokens from this position of the output on."""
        return list(self._texts.get((tuple(prompt_ids), seed), [])[max(0, position) : position + count])

    def half(self, prompt_ids: Sequence[int], seed: int, position: int, count: int) -> list[int]:
        """The same; one token of every few is another one."""
        return [
            token + 1 if (position + k + seed) % WRONG_EVERY == 0 else token
            for k, token in enumerate(self.after(prompt_ids, seed, position, count))
        ]


def write(folder: Path, requests: Sequence[RolloutRequest], trajectories: Sequence[Trajectory]) -> None:
    """More texts, to be recited from the next start, or the next change of the manner, on."""
    known = json.loads((folder / TEXTS).read_text()) if (folder / TEXTS).exists() else []
    new = [[r.prompt_ids, r.seed, t.token_ids] for r, t in zip(requests, trajectories, strict=True)]
    _replace(folder / TEXTS, json.dumps(known + new))


def behave(folder: Path, manner: str) -> None:
    """From the next draft on."""
    _replace(folder / MANNER, manner)


def _replace(file: Path, text: str) -> None:
    """A drafter never reads half of it."""
    unfinished = file.with_suffix(".new")
    unfinished.write_text(text)
    unfinished.rename(file)


def _garbage(texts: Texts, lane: Lane) -> list[int]:
    return [(7919 * (lane.seed + k) + 31 * len(lane.tokens)) % 96 for k in range(4)]


def _mixed(texts: Texts, lane: Lane) -> list[int]:
    kinds = [manner for name, manner in MANNERS.items() if name not in ("mixed", "raises")]
    return kinds[(lane.seed + len(lane.tokens)) % len(kinds)](texts, lane)


def _raises(texts: Texts, lane: Lane) -> list[int]:
    raise RuntimeError("a bug of the draft model")


def _slow(texts: Texts, lane: Lane) -> list[int]:
    time.sleep(0.0003)  # of each request: a batch takes about as long as a round of the engine
    return texts.half(lane.prompt_ids, lane.seed, len(lane.tokens), 1)


MANNERS: dict[str, Callable[[Texts, Lane], list[int]]] = {
    "right": lambda texts, lane: texts.after(lane.prompt_ids, lane.seed, len(lane.tokens), 2),
    "half": lambda texts, lane: texts.half(lane.prompt_ids, lane.seed, len(lane.tokens), 2),
    "stale": lambda texts, lane: texts.after(lane.prompt_ids, lane.seed, len(lane.tokens) - SHIFT, 2),
    "future": lambda texts, lane: texts.after(lane.prompt_ids, lane.seed, len(lane.tokens) + SHIFT, 2),
    "garbage": _garbage,
    "ends": lambda texts, lane: [EOS] * 4,
    "not tokens": lambda texts, lane: [-1, 10**6, (1 << 31) - 1],
    "too many": lambda texts, lane: [3, 4, 5] * 400,
    "nothing": lambda texts, lane: [],
    "slow": _slow,
    "mixed": _mixed,
    "raises": _raises,
}


class Reciter(Continuer):
    version = 1

    def __init__(self, spec: DrafterSpec) -> None:
        self._folder = Path(spec.model_dir)
        self._manner = ""
        self._texts = Texts(self._folder)

    def extend(self, lanes: Sequence[Lane]) -> list[list[int]]:
        manner = (self._folder / MANNER).read_text()
        if manner != self._manner:
            self._manner, self._texts = manner, Texts(self._folder)
        return [MANNERS[manner](self._texts, lane) for lane in lanes]
