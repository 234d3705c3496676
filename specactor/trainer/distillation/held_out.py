"""Responses that a refresh does not learn from, to see on them what it is worth. PURE.

They are of prompts of their own: what was learned from one response helps with all others to its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from specactor.trainer.distillation.buffer import Lesson

EVERY = 4
"""One of so many prompts, and at least one of two."""


def split(lessons: Sequence[Lesson]) -> tuple[list[Lesson], list[Lesson]]:
    """(to learn from, held out) of a step; nothing is held out of the responses to a single prompt."""
    prompts = list(dict.fromkeys(map(_prompt, lessons)))
    number = max(1, len(prompts) // EVERY) if len(prompts) > 1 else 0
    held = {prompts[i * len(prompts) // number] for i in range(number)}
    return [x for x in lessons if _prompt(x) not in held], [x for x in lessons if _prompt(x) in held]


def sample(lessons: Sequence[Lesson], max_tokens: int) -> list[Lesson]:
    """Some of them, evenly spread, of about so many tokens at most."""
    tokens = sum(len(lesson.token_ids) for lesson in lessons)
    return list(lessons[:: max(1, -(-tokens // max_tokens))])


def _prompt(lesson: Lesson) -> bytes:
    return lesson.token_ids[: lesson.prompt_len].tobytes()
