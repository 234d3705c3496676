"""``specactor drafter init|train|eval``: prepare a draft model offline.

Invariants: what is wrong on the command line is one ConfigError, before any work; equal arguments, with --updates and
--threads, write equal bytes unless time runs out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from rich.console import Console

from specactor.config import DraftTrainingConfig
from specactor.config.rules import check_values, rules_of
from specactor.errors import ConfigError, DataError
from specactor.recipes import one_line_errors
from specactor.trainer.drafter import acceptance, init
from specactor.trainer.drafter.buffer import TrainingExample, example_of, read_rollouts
from specactor.trainer.drafter.head import Head
from specactor.trainer.drafter.head_training import HeadTrainer
from specactor.trainer.drafter.recorder import MAX_BYTES, STATES
from specactor.trainer.drafter.train import DrafterTrainer, RefreshStats

PROG = "specactor drafter"
HELD_OUT = 8  # of one set of rollouts `train` leaves out every 8th response, and `eval` takes just these
OF_RUNS = ("refresh", "max_updates", "zero")
"""Settings that say nothing about learning offline."""


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """Make a dense draft model, cut out of the target or random; or an EAGLE-3 head."""

    target: Path
    """Folder of the target, in Hugging Face format."""
    out: Path
    """New folder of the draft model."""
    start: init.Start = field(default_factory=init.TargetStart)
    """start:target-start, start:random-start or start:eagle3-start, and its settings."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Distil the target into a draft model, on rollouts; on the CPU, in float32."""

    draft: Path
    """Folder of the draft model to start from."""
    target: Path
    """Folder of the target: its probabilities of the next token are learned."""
    rollouts: tuple[Path, ...]
    """Files of JSON lines with prompt_ids and token_ids, records of runs (runs/NAME/records), or folders of such."""
    out: Path
    """Folder of the trained draft model; one that is there is replaced."""
    minutes: float = 10.0
    """Longest time to learn, and to compute the target's top-k of the newest distillation.buffer_tokens before that."""
    updates: int = 0
    """Optimizer updates at most, with a learning rate that falls to a hundredth; 0: as many as fit, at one rate."""
    threads: int = 0
    """Of the CPU; 0: all that this process may use."""
    seed: int = 0
    distillation: DraftTrainingConfig = field(default_factory=DraftTrainingConfig)
    """How it learns, as in a run; what concerns runs alone must be left at its default."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Say how many tokens a draft model would have accepted per verify, on responses of the target; on the CPU."""

    draft: Path
    """Folder of the draft model."""
    target: Path
    """Folder of the target."""
    rollouts: tuple[Path, ...]
    """As those of train: held out of them, if they are the same."""
    window: int = 4
    """Draft tokens per verify."""
    responses: int = 512
    """To look at, at most."""
    all: bool = False
    """Take every response, not only those that train leaves out."""
    threads: int = 0
    """Of the CPU; 0: all that this process may use."""
    seed: int = 0


Options = (
    Annotated[InitOptions, tyro.conf.subcommand("init", prefix_name=False)]
    | Annotated[TrainOptions, tyro.conf.subcommand("train", prefix_name=False)]
    | Annotated[EvalOptions, tyro.conf.subcommand("eval", prefix_name=False)]
)


def parse(argv: Sequence[str]) -> InitOptions | TrainOptions | EvalOptions:
    """Return a subcommand's options. Raises ConfigError; ``--help`` prints, and raises SystemExit(0)."""
    if not argv or argv[0] not in ("init", "train", "eval", "-h", "--help"):
        raise ConfigError.at("command", argv[0] if argv else "none", "init, train or eval", f"See {PROG} --help")
    with one_line_errors(argv, lambda token: f"unknown setting {token}. Those there are: {PROG} {argv[0]} --help"):
        options = tyro.cli(Options, prog=PROG, args=list(argv))
    match options:
        case TrainOptions():
            _check_train(options)
        case EvalOptions() if options.window < 1 or options.responses < 1:
            got = (options.window, options.responses)
            raise ConfigError.at("window, responses", got, ">= 1", f"See {PROG} eval --help")
    if not isinstance(options, InitOptions) and options.threads < 0:
        raise ConfigError.at("threads", options.threads, ">= 0", "Leave it out to use all.")
    return options


def _check_train(options: TrainOptions) -> None:
    if not (options.minutes > 0 and options.updates >= 0):
        got = (options.minutes, options.updates)
        raise ConfigError.at("minutes, updates", got, "minutes > 0 and updates >= 0", f"See {PROG} train --help")
    check_values(options.distillation, "distillation")
    usual, rule = DraftTrainingConfig(), rules_of(options.distillation, "distillation")
    for name in OF_RUNS:
        own, default = getattr(options.distillation, name), getattr(usual, name)
        rule(name, own == default, f"{default} in {PROG} train", "It concerns runs. Leave it out.")


def run(argv: Sequence[str], console: Console) -> None:
    options = parse(argv)
    if not isinstance(options, InitOptions):
        torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    init.quiet()
    match options:
        case InitOptions():
            count = init.make_draft_model(options.target, options.out, options.start)
            console.print(f"{options.out}: a draft model of {count / 1e6:.3g} M parameters", soft_wrap=True)
        case TrainOptions():
            stats = train(options)
            console.print(
                f"{options.out}: {stats.updates} updates on {stats.tokens} response tokens in {stats.seconds:.0f} s; "
                f"KL to the target {stats.kl:.3f}, overlap {stats.overlap:.3f} in the last",
                soft_wrap=True,
            )
        case EvalOptions():
            found = evaluate(options)
            console.print(
                f"{found.tokens} tokens, window {options.window}, entropy {found.entropy:.2f} nats\n"
                f"accept_length {found.accept_length:.2f}\n"
                f"accepted per token: {found.shared:.3f}, at most {found.overlap:.3f} (1 - TV)",
                soft_wrap=True,
            )


def train(options: TrainOptions) -> RefreshStats:
    """Learn, write the draft model, and return what was done. Raises SpecActorError, and writes nothing, without an
    update."""
    settings = options.distillation
    init.check_out(options.out, options.draft, options.target, *options.rollouts)
    found = _examples(options.rollouts)
    examples = [example for i, example in enumerate(found) if i % HELD_OUT]
    if not examples:
        raise DataError(
            f"rollouts: got {len(found)} response to learn from, expected at least 2: every {HELD_OUT}th is held out "
            "for eval, from the first on. Give more."
        )
    target = init.read_model(options.target)
    model = init.read_draft(options.draft, target)
    _check_vocabulary(target, model)
    stats = learn(
        target, model, examples, settings, seed=options.seed, limit_s=60 * options.minutes, updates=options.updates
    )
    if not stats.updates:
        raise ConfigError.at(
            "minutes",
            options.minutes,
            "the time of one update at least",
            "Nothing was written. Raise it, or lower distillation.tokens_per_update or distillation.buffer_tokens.",
        )
    init.write_model(model, options.out, tokenizer=options.draft)
    return stats


def learn(
    target: Any,
    model: Any,
    examples: Sequence[TrainingExample],
    settings: DraftTrainingConfig,
    *,
    seed: int,
    limit_s: float,
    updates: int,
    group: dist.ProcessGroup | None = None,
) -> RefreshStats:
    """Distil the target into the model, in this process or, with equal arguments, in all of `group`. `limit_s` includes
    the target's pass over the examples. Over `updates` the learning rate falls to a hundredth; 0: as many as fit, at
    one rate."""
    layers = model.layers_learned if isinstance(model, Head) else ()
    # A pass of the target takes a third of a head's update. It is made once where its states fit as they do in a run.
    num_tokens = min(settings.buffer_tokens, sum(len(example.token_ids) for example in examples))
    num_bytes = num_tokens * len(layers) * model.config.hidden_size * STATES.itemsize
    once = settings.top_k > 0 and num_bytes <= MAX_BYTES
    trainer = (
        HeadTrainer(settings, model, seed=seed, group=group, target=None if once else target)
        if isinstance(model, Head)
        else DrafterTrainer(settings, model, seed=seed, group=group)
    )
    trainer.buffer.add(examples)
    if not len(trainer.buffer):
        raise ConfigError.at(
            "distillation.tokens_per_microbatch, buffer_tokens",
            min(settings.tokens_per_microbatch, settings.buffer_tokens),
            "more tokens than the shortest prompt",
            "Raise both to the tokens of a prompt with its response.",
        )
    start_s = time.perf_counter()
    if once:  # of what fits the buffer alone
        examples_with_top_k = acceptance.with_top_k(
            target,
            trainer.buffer.take(),
            top_k=settings.top_k,
            layers=layers,
            go_on=lambda: not trainer.on_any_rank(time.perf_counter() - start_s > limit_s),
        )
        trainer.buffer.add(examples_with_top_k)
    return trainer.refresh(
        limit_s=limit_s - (time.perf_counter() - start_s),
        clock=time.perf_counter,
        max_updates=updates,
        rate_of=partial(_falling_rate, settings, updates) if updates else None,
    )


def _falling_rate(settings: DraftTrainingConfig, updates: int, update: int) -> float:
    rise = min(1.0, (update + 1) / max(1, settings.warmup_updates))
    return settings.learning_rate * rise * max(0.01, 1 - update / updates)


def evaluate(options: EvalOptions) -> acceptance.Acceptance:
    examples = _examples(options.rollouts)
    examples = (examples if options.all else examples[::HELD_OUT])[: options.responses]
    target = init.read_model(options.target)
    draft = init.read_draft(options.draft, target)
    _check_vocabulary(target, draft)
    return acceptance.measure(target, draft, examples, window=options.window, seed=options.seed)


def _examples(paths: Sequence[Path]) -> list[TrainingExample]:
    found = [example_of(line) for line in read_rollouts(paths) if line.temperature > 0]
    if not found:
        raise DataError(
            f"{', '.join(map(str, paths))}: got greedy responses (temperature 0) alone, expected sampled ones. Give "
            "the records of a run."
        )
    return found


def _check_vocabulary(target: object, draft: object) -> None:
    there, here = (getattr(model, "config", None) for model in (target, draft))
    sizes = [getattr(config, "vocab_size", 0) for config in (there, here)]
    if sizes[0] != sizes[1]:
        raise ConfigError.at("draft", f"{sizes[1]} tokens", f"the target's {sizes[0]} tokens", f"Use {PROG} init.")
