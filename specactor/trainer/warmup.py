"""The model that reinforcement learning starts from: read, made on the spot, or warmed up on worked solutions.

What is made is kept in a folder named by the hash of everything that went into it, so a second run starts from the
same bits at once. A folder appears under its name only when it is whole.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
from transformers import PreTrainedTokenizerBase

from specactor.config import Config, DraftTrainingConfig
from specactor.config.speculation import MADE_BY_WARM_UP, WARM_UP_HEAD
from specactor.config.train import linear_decay
from specactor.data.dataset import Dataset
from specactor.data.tiny_model import make_tiny_model
from specactor.errors import ConfigError
from specactor.parallel.collective import Collective
from specactor.parallel.layout import Layout
from specactor.progress import Progress
from specactor.run_folder import WARM_UPS
from specactor.trainer.drafter import init
from specactor.trainer.drafter.buffer import example_from
from specactor.trainer.drafter.command import learn
from specactor.trainer.drafter.head import Eagle3Start
from specactor.trainer.drafter.train import RefreshStats
from specactor.trainer.policy import PolicyTrainer
from specactor.types import Problem, TrainSequence

Solver = Callable[[Problem, random.Random, int], str | Sequence[tuple[str, bool]]]
"""Returns a response, or its parts and whether each is learned from: an environment's part is not."""

BATCH_SIZE = 32
"""Worked solutions per step."""
DRAFT_BATCHES = 64
"""Of `BATCH_SIZE` worked solutions: what a draft model of the warm-up learns from."""
DRAFT_UPDATES = 250
DRAFT_TOKENS = 2048
"""Per update. docs/results/quickstart_speed.md has what a draft model is worth that learned so."""
DRAFT_LIMIT_S = 40.0
"""A machine that is too slow for all updates gets a draft model that has learned less."""


def initial_model(config: Config, collective: Collective) -> Path:
    """Folder of the model that is read, or of the tiny one, made by rank 0 where it is not cached."""
    if config.model.tiny is None:
        return Path(config.model.path)
    tiny = config.model.tiny
    folder = Path(config.output_dir, WARM_UPS) / f"model-{_hash(asdict(tiny), config.seed)}"

    def make() -> None:
        if collective.rank == 0 and not folder.exists():
            try:
                make_tiny_model(tiny, config.seed, folder)
            except (ConfigError, OSError):
                if not folder.exists():  # else another run has made the same model meanwhile
                    raise

    collective.together("making the model", make)
    return folder


def warmed_up_model(
    config: Config,
    layout: Layout,
    start: Path,
    problems: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    collective: Collective,
    progress: Progress,
) -> Path:
    """Folder of the model after the supervised warm-up; trains it where it is not cached. Collective."""
    if not config.warmup.solver:
        return start
    solver = find_solver(config.warmup.solver)
    recipe = {**asdict(config.warmup), "batch_size": BATCH_SIZE}
    source = Path(inspect.getfile(solver)).read_text()
    train = config.train
    optimizer = (train.weight_decay, train.adam_betas, train.grad_clip, config.model.dtype)
    key = _hash(
        *(recipe, _content(start), config.seed, problems.digest, config.rollout.max_new_tokens, source),
        *(optimizer, asdict(layout)),
    )
    folder = Path(config.output_dir, WARM_UPS) / f"warmup-{key}"
    if not collective.any(not folder.exists()):
        return folder
    trainer = PolicyTrainer(config, layout, start)
    total = sum(config.warmup.steps)
    for done, (stage, rate) in enumerate(_rates(config)):
        batch = solved_batch(config, problems, solver, tokenizer, stage=stage, step=done)
        loss = trainer.supervised_step(batch, learning_rate=rate)
        progress.count(done + 1, total, loss=loss)
    if collective.any(not folder.exists()):  # else another run has made the same model meanwhile, and may be reading it
        trainer.export_hf(folder)
    return folder


def with_draft_model(
    config: Config,
    policy: Path,
    problems: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    collective: Collective,
    progress: Progress,
) -> Config:
    """Return the config with the folder of a draft model where it asks for one of the warm-up's. Collective.

    Rank 0 cuts a layer out of the policy, or makes a head for it, and trains it on worked solutions; one that is cached
    is taken.
    """
    rollout = config.rollout
    if rollout.speculation.mode == "off" or rollout.speculation.first_draft_model not in MADE_BY_WARM_UP:
        return config
    learning = (
        DRAFT_UPDATES,
        DRAFT_BATCHES,
        DRAFT_TOKENS,
        asdict(DraftTrainingConfig.of(config.distillation)),
        rollout.temperature,
        *([WARM_UP_HEAD] if rollout.speculation.first_draft_model == WARM_UP_HEAD else []),
    )
    folder = Path(config.output_dir, WARM_UPS) / f"draft-{_hash(_content(policy), config.seed, learning)}"

    def make() -> None:
        if collective.rank == 0 and not folder.exists():
            learned = _distil(config, policy, problems, tokenizer, folder)
            progress.note(f"it made {learned.updates} of {DRAFT_UPDATES} updates in {learned.seconds:.0f} s")

    if not folder.exists():
        progress.note(f"a draft model learns for {DRAFT_LIMIT_S:.0f} s at most")
    collective.together("draft model", make)
    speculation = rollout.speculation.with_first(str(folder))
    return replace(config, rollout=replace(rollout, speculation=speculation))


def _distil(
    config: Config, policy: Path, problems: Dataset, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> RefreshStats:
    solver, stages = find_solver(config.warmup.solver), len(config.warmup.steps)
    # Of all stages: what the policy was shown first it falls back to as it learns.
    sequences = [
        sequence
        for step in range(DRAFT_BATCHES)
        for sequence in solved_batch(config, problems, solver, tokenizer, stage=step % stages, step=step)
    ]
    examples = [example_from(s, None, version=0, temperature=config.rollout.temperature) for s in sequences]
    # The policy's probabilities would take a pass over all of them, which lasts longer than learning from the samples.
    settings = replace(DraftTrainingConfig.of(config.distillation), top_k=0, tokens_per_update=DRAFT_TOKENS)
    init.quiet()
    with tempfile.TemporaryDirectory() as place:
        start = Path(place) / "start"
        is_head = config.rollout.speculation.first_draft_model == WARM_UP_HEAD
        init.make_draft_model(policy, start, Eagle3Start() if is_head else init.TargetStart())
        target = init.read_model(policy) if is_head else None
        model = init.read_draft(start, target)
        stats = learn(target, model, examples, settings, seed=config.seed, limit_s=DRAFT_LIMIT_S, updates=DRAFT_UPDATES)
        init.write_model(model, folder, tokenizer=start)
    return stats


def find_solver(path: str) -> Solver:
    """The function at ``module:function``. Raises ConfigError when there is none."""
    module, _, name = path.partition(":")
    try:
        found: Solver = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError.at(
            "warmup.solver", path, "the import path module:function of a function", f"It failed with: {error}."
        ) from error
    return found


def solved_batch(
    config: Config,
    problems: Sequence[Problem],
    solver: Solver,
    tokenizer: PreTrainedTokenizerBase,
    *,
    stage: int,
    step: int,
) -> list[TrainSequence]:
    """`BATCH_SIZE` problems with their worked solutions; the same for the same seed, stage and step."""
    rng = random.Random(f"{config.seed}/{stage}/{step}")
    batch = []
    for _ in range(BATCH_SIZE):
        problem = problems[rng.randrange(len(problems))]
        solution = solver(problem, rng, stage)
        response: list[int] = []
        mask: list[bool] = []
        for text, learned in [(solution, True)] if isinstance(solution, str) else solution:
            part = tokenizer.encode(text, add_special_tokens=False)
            response += part
            mask += [learned] * len(part)
        batch.append(
            TrainSequence(
                token_ids=(*problem.prompt_ids, *response, tokenizer.eos_token_id),
                prompt_len=len(problem.prompt_ids),
                loss_mask=() if all(mask) else (*mask, True),
            )
        )
    return batch


def _rates(config: Config) -> Iterator[tuple[int, float]]:
    """(stage, learning rate) of every supervised step."""
    for stage, (steps, peak) in enumerate(zip(config.warmup.steps, config.warmup.learning_rates, strict=True)):
        for step in range(steps):
            yield stage, linear_decay(step, steps, peak)


def _content(model: Path) -> list[tuple[str, int, str]]:
    """Return of a model's folder the names and sizes of its files, and what the small ones hold."""
    small = 2**20
    return [
        (file.name, file.stat().st_size, file.read_bytes().hex() if file.stat().st_size < small else "")
        for file in sorted(model.iterdir())
        if file.is_file()
    ]


def _hash(*parts: object) -> str:
    return hashlib.blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=8).hexdigest()
