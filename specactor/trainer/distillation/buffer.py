"""The newest rollouts, for the draft model to learn from. PURE: arrays in, arrays out.

Invariants:
1. The buffer never holds more than `max_tokens` tokens of prompts and responses, nor of one lesson more than
   `max_lesson_tokens`: of a longer one the first are kept, with their law.
2. What leaves first is of the oldest policy version; of one version, the shortest response.
3. What is drawn depends on the seed, the number of the draw and the content alone, so a resumed run draws the same.
4. A state that was saved and loaded is equal bit for bit.

Newer and longer responses are drawn more often: the policy has moved on from old ones, and long ones are what a rollout
waits for. Shape legend: L tokens, R of them of the response, K likeliest tokens of the policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specactor.errors import DataError
from specactor.types import TrainSequence

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Law:
    """The policy's likeliest next tokens at every response token, likeliest first."""

    tokens: NDArray[np.int32]
    """[R, K]"""
    logprobs: NDArray[Any]
    """[R, K] float16 or float32, of the whole distribution at the sampling temperature."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Lesson:
    """One response, and what is known of the distributions that it was sampled from."""

    token_ids: NDArray[np.int32]
    """[L] prompt and response."""
    prompt_len: int
    version: int
    """Of the policy that generated it."""
    reward: float = 0.0
    temperature: float = 1.0
    law: Law | None = None

    @property
    def response_len(self) -> int:
        return len(self.token_ids) - self.prompt_len


def lesson_from(sequence: TrainSequence, law: Law | None, *, version: int, reward: float, temperature: float) -> Lesson:
    """Of what the policy learns from. Args: the policy's version that generated it."""
    return Lesson(
        token_ids=np.array(sequence.token_ids, np.int32),
        prompt_len=sequence.prompt_len,
        version=version,
        reward=reward,
        temperature=temperature,
        law=law,
    )


def checked(lesson: Lesson) -> Lesson:
    """The argument. Raises DataError for one that cannot be learned from."""
    if not 1 <= lesson.prompt_len < len(lesson.token_ids):
        raise DataError(
            f"lesson: got a prompt of {lesson.prompt_len} in {len(lesson.token_ids)} tokens, expected at least one "
            "token of each, prompt and response. Leave out responses without tokens."
        )
    if not lesson.temperature > 0:
        raise DataError(f"lesson: got temperature {lesson.temperature}, expected > 0. Leave greedy responses out.")
    if lesson.law is not None and not (
        len(lesson.law.tokens) == len(lesson.law.logprobs) == lesson.response_len
        and lesson.law.tokens.shape == lesson.law.logprobs.shape
    ):
        raise DataError(
            f"lesson: got likeliest tokens of shape {lesson.law.tokens.shape} with log-probabilities of shape "
            f"{lesson.law.logprobs.shape}, expected one row for each of {lesson.response_len} response tokens."
        )
    return lesson


def cut(lesson: Lesson, num_tokens: int) -> Lesson:
    """Its first tokens: more than those of the prompt, fewer than all."""
    law, kept = lesson.law, num_tokens - lesson.prompt_len
    if law is not None:
        law = Law(tokens=law.tokens[:kept].copy(), logprobs=law.logprobs[:kept].copy())
    return replace(lesson, token_ids=lesson.token_ids[:num_tokens].copy(), law=law)


class DraftBuffer:
    """Of one run; the same on every rank."""

    def __init__(self, *, max_tokens: int, half_life_steps: float, seed: int, max_lesson_tokens: int) -> None:
        """Longer lessons than `max_lesson_tokens` are cut; those whose prompt alone is that long are left out."""
        self._max_tokens, self._half_life, self._seed = max_tokens, half_life_steps, seed
        self._longest = min(max_lesson_tokens, max_tokens)
        self._lessons: list[Lesson] = []
        self.too_long = 0
        """Lessons left out so far."""
        self._known_chances: NDArray[np.float64] | None = None
        """Of the content as it is; draws are many, and lessons thousands."""

    def __len__(self) -> int:
        return len(self._lessons)

    @property
    def lessons(self) -> Sequence[Lesson]:
        return self._lessons

    @property
    def num_tokens(self) -> int:
        return sum(len(lesson.token_ids) for lesson in self._lessons)

    def mean_reward(self) -> float:
        return float(np.mean([lesson.reward for lesson in self._lessons])) if self._lessons else 0.0

    def fitting(self, lessons: Sequence[Lesson]) -> tuple[list[Lesson], int]:
        """(as they would be kept, how many of them were cut); those that are left out are counted. Raises DataError for
        a lesson that cannot be learned from."""
        fit: list[Lesson] = []
        num_cut = 0
        for lesson in map(checked, lessons):
            if len(lesson.token_ids) <= self._longest:
                fit.append(lesson)
            elif lesson.prompt_len < self._longest:
                fit.append(cut(lesson, self._longest))
                num_cut += 1
            else:
                self.too_long += 1
        return fit, num_cut

    def add(self, lessons: Sequence[Lesson]) -> None:
        """As far as they fit. Raises DataError for a lesson that cannot be learned from."""
        self._lessons += self.fitting(lessons)[0]
        self._evict()

    def take(self) -> list[Lesson]:
        """All lessons, which are then gone."""
        taken, self._lessons = self._lessons, []
        return taken

    def draw(self, number: int, num_tokens: int) -> list[Lesson]:
        """Lessons of at most `num_tokens` tokens together, or one longer than that; none twice. [] when empty.

        The `number`-th draw: the same lessons whenever it is asked for, while the content is the same. Weighted
        sampling without replacement by exponential keys (Efraimidis and Spirakis, Inf. Proc. Letters 97, 2006).
        """
        if not self._lessons:
            return []
        chance = np.random.default_rng([self._seed, number])
        keys = chance.exponential(size=len(self._lessons)) / self._chances()
        drawn: list[Lesson] = []
        left = num_tokens
        for index in np.argsort(keys, kind="stable"):
            lesson = self._lessons[index]
            if drawn and len(lesson.token_ids) > left:
                break
            drawn.append(lesson)
            left -= len(lesson.token_ids)
        return drawn

    def state(self) -> Arrays:
        """All lessons as a few arrays."""
        laws = [lesson.law for lesson in self._lessons]
        return {
            "tokens": _joined([x.token_ids for x in self._lessons], np.int32),
            "lengths": np.array([len(x.token_ids) for x in self._lessons], np.int64),
            "prompt_lens": np.array([x.prompt_len for x in self._lessons], np.int64),
            "versions": np.array([x.version for x in self._lessons], np.int64),
            "rewards": np.array([x.reward for x in self._lessons], np.float64),
            "temperatures": np.array([x.temperature for x in self._lessons], np.float64),
            "law_widths": np.array([law.tokens.shape[1] if law else -1 for law in laws], np.int64),
            "law_is_half": np.array([bool(law and law.logprobs.dtype == np.float16) for law in laws], np.bool_),
            "law_tokens": _joined([law.tokens.reshape(-1) for law in laws if law], np.int32),
            "law_halves": _joined([law.logprobs.reshape(-1) for law in laws if law and _half(law)], np.float16),
            "law_singles": _joined([law.logprobs.reshape(-1) for law in laws if law and not _half(law)], np.float32),
            "too_long": np.array([self.too_long], np.int64),
        }

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Replace the content with what `state` returned."""
        take = {name: _Reader(state[name]) for name in ("tokens", "law_tokens", "law_halves", "law_singles")}
        self._lessons = []
        for i, (length, prompt_len) in enumerate(zip(state["lengths"], state["prompt_lens"], strict=True)):
            width, law = int(state["law_widths"][i]), None
            if width >= 0:
                shape = (int(length) - int(prompt_len), width)
                logprobs = take["law_halves" if state["law_is_half"][i] else "law_singles"]
                law = Law(tokens=take["law_tokens"](shape), logprobs=logprobs(shape))
            self._lessons.append(
                Lesson(
                    token_ids=take["tokens"]((int(length),)),
                    prompt_len=int(prompt_len),
                    version=int(state["versions"][i]),
                    reward=float(state["rewards"][i]),
                    temperature=float(state["temperatures"][i]),
                    law=law,
                )
            )
        self.too_long = int(state["too_long"][0])
        self._evict()

    def _chances(self) -> NDArray[np.float64]:
        """Of every lesson to be drawn."""
        if self._known_chances is not None:
            return self._known_chances
        versions = np.array([lesson.version for lesson in self._lessons])
        lengths = np.array([lesson.response_len for lesson in self._lessons])
        chances: NDArray[np.float64] = lengths * 0.5 ** ((versions.max() - versions) / self._half_life)
        self._known_chances = np.maximum(chances, np.finfo(np.float64).tiny)
        return self._known_chances

    def _evict(self) -> None:
        self._known_chances = None
        too_many = self.num_tokens - self._max_tokens
        if too_many <= 0:
            return
        gone: set[int] = set()
        worst_first = sorted(
            range(len(self._lessons)), key=lambda i: (self._lessons[i].version, self._lessons[i].response_len, i)
        )
        for i in worst_first:
            if too_many <= 0:
                break
            gone.add(i)
            too_many -= len(self._lessons[i].token_ids)
        self._lessons = [lesson for i, lesson in enumerate(self._lessons) if i not in gone]


class _Reader:
    """Consecutive pieces of a flat array, as copies."""

    def __init__(self, flat: NDArray[Any]) -> None:
        self._flat, self._at = flat, 0

    def __call__(self, shape: tuple[int, ...]) -> NDArray[Any]:
        size = int(np.prod(shape))
        piece = self._flat[self._at : self._at + size].reshape(shape).copy()
        self._at += size
        return piece


def _half(law: Law) -> bool:
    return law.logprobs.dtype == np.float16


def _joined(parts: Sequence[NDArray[Any]], kind: Any) -> NDArray[Any]:
    return np.concatenate(parts).astype(kind) if parts else np.zeros(0, kind)
