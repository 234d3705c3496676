"""Makes draft models of several sizes for one target, with their accept_length by seconds of distillation.

    python -m benchmarks.drafter_kinds_learning JOB_AS_JSON

Each is distilled as in a run: by refreshes of the package's drafter trainer, at one learning rate, on responses that
the target sampled at temperature 1. Between refreshes it is measured on responses that none learns from, with the noise
of the target (`distillation.acceptance`). Prints RESULT and a list of `Learned` as JSON.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.distillation import sampled
from specactor.config import DraftTrainingConfig, SourceConfig
from specactor.data.dataset import build_dataset
from specactor.data.tokenizer import load_tokenizer
from specactor.trainer.drafter import acceptance, init
from specactor.trainer.drafter.buffer import TrainingExample
from specactor.trainer.drafter.train import DrafterTrainer

HELD_OUT = 8  # one of so many responses is kept for measuring


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """How a draft model begins."""

    num_layers: int = 1
    hidden_size: int = 0
    """0: it is cut out of the target, its first layers; else it is random, with so wide a residual stream."""

    def start(self) -> init.Start:
        if not self.hidden_size:
            return init.TargetStart(num_layers=self.num_layers)
        return init.RandomStart(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=max(1, self.hidden_size // 32),
            num_kv_heads=max(1, self.hidden_size // 64),
            intermediate_size=4 * self.hidden_size,
        )


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to make."""

    target: str  # folder
    folder: str  # existing one, for the draft models, under their names
    beginnings: dict[str, Beginning]
    source: SourceConfig  # of the prompts
    responses: int
    max_new_tokens: int
    seconds: tuple[float, ...]
    """Of distillation in all, ascending, at which a draft model is measured. 0 is always measured."""
    window: int
    seed: int = 0
    settings: DraftTrainingConfig = DraftTrainingConfig()


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """One draft model."""

    name: str
    parameters: int
    points: list[tuple[float, float]]  # (seconds of distillation, accept_length), the first at 0
    updates: int
    tokens: int  # response tokens learned from


def reach_s(points: list[tuple[float, float]], share: float) -> float:
    """Seconds after which accept_length is, and stays, at least this share of its last value."""
    aim = share * points[-1][1]
    below = [i for i, (_, length) in enumerate(points) if length < aim]
    return points[below[-1] + 1 if below else 0][0]


def learn(
    name: str, target: Any, job: Job, examples: list[TrainingExample], held_out: list[TrainingExample]
) -> Learned:
    """Args: with the target's top-k; of the target, to measure with."""
    folder = Path(job.folder) / name
    parameters = init.make_draft_model(Path(job.target), folder, job.beginnings[name].start())
    draft = init.read_model(folder)
    trainer = DrafterTrainer(job.settings, draft, seed=job.seed)
    trainer.buffer.add(examples)
    points: list[tuple[float, float]] = []
    spent_s, tokens = 0.0, 0
    for until_s in (0.0, *job.seconds):
        if until_s > spent_s:
            stats = trainer.refresh(limit_s=until_s - spent_s, clock=time.perf_counter)
            spent_s, tokens = spent_s + stats.seconds, tokens + stats.tokens
        found = acceptance.measure(target, draft, held_out, window=job.window, seed=job.seed)
        points.append((spent_s, found.accept_length))
        print(f"{name}: {spent_s:.1f} s, {trainer.updates} updates, accept_length {points[-1][1]:.2f}", flush=True)
    init.write_model(draft, folder, tokenizer=Path(job.target))
    return Learned(name=name, parameters=parameters, points=points, updates=trainer.updates, tokens=tokens)


def main() -> None:
    job = msgspec.json.decode(sys.argv[1], type=Job)
    torch.set_num_threads(1)
    init.quiet()
    target = init.read_model(Path(job.target))
    problems = build_dataset(job.source, load_tokenizer(Path(job.target)), max_prompt_tokens=256)
    prompts = [problems[i % len(problems)].prompt_ids for i in range(job.responses)]
    responses = sampled(target, prompts, job.max_new_tokens, job.seed)
    taught = [example for i, example in enumerate(responses) if i % HELD_OUT]
    examples = acceptance.with_top_k(target, taught, top_k=job.settings.top_k)
    print(f"sampled {len(responses)} responses", flush=True)
    learned = [learn(name, target, job, examples, responses[::HELD_OUT]) for name in job.beginnings]
    print(f"RESULT {msgspec.json.encode(learned).decode()}", flush=True)


if __name__ == "__main__":
    main()
