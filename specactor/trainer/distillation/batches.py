"""Lessons as padded tensors, and their spread over data-parallel ranks.

A row per lesson, padded on the right: with a causal mask no token sees the padding behind it, and padding has neither a
position in the loss nor a weight, so a lesson's loss does not depend on its neighbours.

Shape legend: B lessons, T tokens of the longest of them, N response tokens of all of them, K likeliest tokens.
"""

# ruff: noqa: N815 - tensor fields carry shape suffixes

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specactor.trainer.distillation.buffer import Law, Lesson
from specactor.trainer.distillation.emphasis import Floats, bins_of


@dataclass(frozen=True, kw_only=True)
class Batch:
    tokens_BT: Tensor
    row_N: Tensor
    """Which of the B * T positions predict a response token: those before it."""
    targets_N: Tensor
    temperatures_N: Tensor
    weights_N: Tensor
    top_tokens_NK: Tensor
    top_logp_NK: Tensor
    has_law_N: Tensor
    bins_N: Tensor
    """Of their response positions (see `emphasis`)."""


def plan(lengths: Sequence[int], ranks: int, capacity: int) -> list[list[list[int]]]:
    """Per rank its micro-batches; per micro-batch, indices into `lengths`. PURE.

    Every index is in one micro-batch; rows * longest is at most `capacity`, or it is one lesson; all ranks have the
    same number of micro-batches, of which some are empty only where no other holds two lessons. Neighbours in length
    are together, so little is padding.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    made: list[list[int]] = []
    for i in order:
        if made and (len(made[-1]) + 1) * lengths[made[-1][0]] <= capacity:
            made[-1].append(i)
        else:
            made.append([i])
    while len(made) % ranks:
        sizes = [len(members) * lengths[members[0]] if len(members) > 1 else 0 for members in made]
        largest = sizes.index(max(sizes))
        half = (len(made[largest]) + 1) // 2  # rather than leaving ranks without work
        made[largest : largest + 1] = [made[largest][:half], made[largest][half:]]
    return [made[rank::ranks] for rank in range(ranks)]


def of_one_width(lessons: Sequence[Lesson]) -> list[Lesson]:
    """With as many likeliest tokens as the law with the fewest of them: `top_k` may have changed at a resume, and a
    token that was not kept has no probability to compare with."""
    width = min((lesson.law.tokens.shape[1] for lesson in lessons if lesson.law), default=0)

    def cut(lesson: Lesson) -> Lesson:
        if lesson.law is None or lesson.law.tokens.shape[1] == width:
            return lesson
        law = Law(tokens=lesson.law.tokens[:, :width], logprobs=lesson.law.logprobs[:, :width])
        return replace(lesson, law=law)

    return [cut(lesson) for lesson in lessons]


def build(lessons: Sequence[Lesson], weights: Sequence[Floats], device: torch.device) -> Batch:
    """Args: weights of each lesson's response tokens. Without lessons: one token that nothing is learned from."""
    longest = max((len(lesson.token_ids) for lesson in lessons), default=1)
    lessons = of_one_width(lessons)
    width = next((lesson.law.tokens.shape[1] for lesson in lessons if lesson.law), 0)
    tokens = np.zeros((max(1, len(lessons)), longest), np.int64)
    for row, lesson in zip(tokens, lessons, strict=False):
        row[: len(lesson.token_ids)] = lesson.token_ids
    sizes = [lesson.response_len for lesson in lessons]
    rows = [
        np.arange(lesson.prompt_len - 1, len(lesson.token_ids) - 1) + i * longest for i, lesson in enumerate(lessons)
    ]
    top_tokens = np.zeros((sum(sizes), width), np.int64)
    top_logp = np.full((sum(sizes), width), -np.inf, np.float32)
    known = np.zeros(sum(sizes), np.bool_)
    start = 0
    for lesson, size in zip(lessons, sizes, strict=True):
        if lesson.law is not None:
            there = slice(start, start + size)
            top_tokens[there], top_logp[there] = lesson.law.tokens, lesson.law.logprobs
            known[there] = True
        start += size
    return Batch(
        tokens_BT=torch.from_numpy(tokens).to(device),
        row_N=_joined(rows, np.int64, device),
        targets_N=_joined([lesson.token_ids[lesson.prompt_len :] for lesson in lessons], np.int64, device),
        temperatures_N=_joined([np.full(x.response_len, x.temperature) for x in lessons], np.float32, device),
        weights_N=_joined(list(weights), np.float32, device),
        top_tokens_NK=torch.from_numpy(top_tokens).to(device),
        top_logp_NK=torch.from_numpy(top_logp).to(device),
        has_law_N=torch.from_numpy(known).to(device),
        bins_N=_joined([bins_of(size) for size in sizes], np.int64, device),
    )


def _joined(parts: Sequence[NDArray[Any]], kind: type, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(kind) if parts else np.zeros(0, kind)).to(device)
