"""How far the draft model could have come back after a jump: offline, on what a run of `drafter_refresh_recovery` left.

The buffer in the run's last checkpoint holds the responses of every policy version with the policy's likeliest tokens,
so draft models can be measured on any of these rollouts, and taught on the ones before it for as long as one likes.
What is measured is accept_length with shared noise as in `distillation.acceptance`; engines sharpen the noise and reach
a little more, so figures compare with each other alone.

Shape legend: N response tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor

from benchmarks.drafter_refresh_recovery import AIM
from specactor.trainer.distillation import batches, losses, start
from specactor.trainer.distillation.acceptance import accept_length, noise_given
from specactor.trainer.distillation.buffer import DraftBuffer, Lesson
from specactor.trainer.distillation.drafter import BUFFER, DrafterTrainer
from specactor.trainer.distillation.in_run import FOLDER
from specactor.trainer.distillation.settings import DistillationConfig

CPU = torch.device("cpu")
MANY_UPDATES = 120
"""Of a refresh that need not hurry: more bring hardly anything."""
CONFIG = DistillationConfig(tokens_per_update=1024, tokens_per_microbatch=1024)
"""As in the runs."""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """accept_length, offline. All but the first on the last rollout."""

    before: float
    """Of the rollout before the jump, by the draft model of then."""
    untaught: float
    """By that draft model."""
    taught: float
    """By that of the run, after its refreshes."""
    taught_long: float
    """After as many refreshes on the same responses, of `MANY_UPDATES` each."""
    memorised: float
    """By one that has learned from the very responses that it is measured on: the model has room for them."""

    def text(self) -> str:
        aim = AIM * self.before
        verdict = ""
        if self.taught_long < aim <= self.memorised:
            verdict = (
                " So neither its size nor the time is what is short, but different responses: a step has few prompts, "
                "and responses to one prompt are alike."
            )
        return (
            f"Offline, on the last rollout, without the engines' sharpening: {self.before:.2f} before the jump; after "
            f"it {self.untaught:.2f} untaught, {self.taught:.2f} as the run taught it, {self.taught_long:.2f} with "
            f"{MANY_UPDATES} updates in each refresh on the same responses, and {self.memorised:.2f} when it learns "
            f"from the very responses that it is measured on.{verdict}"
        )


def ceilings(root: Path, draft: Path, *, before: int, window: int) -> Ceilings:
    """Args: a run's folder; the draft model's; the policy's version before the jump."""
    start.quiet()
    early, late = (state_of(root, step) for step in (before + 1, 0))
    rollouts = rollouts_of(late)
    last = max(rollouts)

    def measured(trainer: DrafterTrainer, version: int = last) -> float:
        return offline_accept_length(trainer.model, rollouts[version], window=window)

    then, long, memorised = (taught(draft, early) for _ in range(3))
    for version in range(before + 1, last):
        long.buffer.add(rollouts[version])
        learn(long)
    memorised.buffer.restore(empty().state())
    memorised.buffer.add(rollouts[last])
    learn(memorised)
    return Ceilings(
        before=measured(then, before),
        untaught=measured(then),
        taught=measured(taught(draft, late)),
        taught_long=measured(long),
        memorised=measured(memorised),
    )


def state_of(root: Path, step: int) -> Path:
    """Folder of the draft model in the checkpoint of a step; 0: in the last one."""
    found = sorted((root / "checkpoints").glob(f"step-{step:06d}" if step else "step-*"))
    return found[-1] / FOLDER


def taught(draft: Path, state: Path) -> DrafterTrainer:
    """The draft model of a checkpoint, with its buffer and optimizer."""
    trainer = DrafterTrainer(CONFIG, start.read_model(draft), seed=0)
    trainer.load(state)
    return trainer


def learn(trainer: DrafterTrainer) -> None:
    trainer.refresh(limit_s=1e9, clock=lambda: 0.0, max_updates=MANY_UPDATES)


def empty() -> DraftBuffer:
    return DraftBuffer(max_tokens=CONFIG.buffer_tokens, half_life_steps=1.0, seed=0, max_lesson_tokens=2**31)


def rollouts_of(state: Path) -> dict[int, list[Lesson]]:
    """Policy version -> responses in the buffer that it generated."""
    buffer = empty()
    buffer.restore(load_file(state / BUFFER))
    found: dict[int, list[Lesson]] = {}
    for lesson in buffer.lessons:
        found.setdefault(lesson.version, []).append(lesson)
    return found


@torch.no_grad()
def offline_accept_length(draft: Any, lessons: Sequence[Lesson], *, window: int, seed: int = 0) -> float:
    """As `distillation.acceptance.measure`, from the laws that the lessons keep instead of the target."""
    chance = torch.Generator().manual_seed(seed)
    agrees: list[list[bool]] = []
    for indices in batches.plan([len(lesson.token_ids) for lesson in lessons], 1, 8192)[0]:
        members = [lessons[i] for i in indices]
        batch = batches.build(members, [np.ones(x.response_len) for x in members], CPU)
        logits_NV = draft(input_ids=batch.tokens_BT, use_cache=False).logits.flatten(0, 1)[batch.row_N]
        logq_NV = losses.log_draft(logits_NV, batch.temperatures_N).double()
        noise_NV = noise_given(whole_law(batch, logq_NV.shape[1]), batch.targets_N, chance)
        right_N = (logq_NV + noise_NV).argmax(1) == batch.targets_N
        agrees += [part.tolist() for part in torch.split(right_N, [x.response_len for x in members])]
    return accept_length(agrees, window)


def whole_law(batch: batches.Batch, vocab_size: int) -> Tensor:
    """[N, V] log-probabilities of the policy: those that were kept, what is left of 1 spread over all other tokens."""
    kept_NK = batch.top_logp_NK.double().exp()
    others = max(1, vocab_size - kept_NK.shape[1])
    rest_N1 = (1 - kept_NK.sum(1, keepdim=True)).clamp(min=1e-7) / others
    law_NV = rest_N1.expand(-1, vocab_size).scatter(1, batch.top_tokens_NK, kept_NK.clamp(min=1e-12))
    return (law_NV / law_NV.sum(1, keepdim=True)).log()
