"""The model that reinforcement learning starts from, cached under the hash of all that went into it. It appears whole
or not at all.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from specactor.config import Config, DraftTrainingConfig
from specactor.config.speculation import MADE_BY_WARM_UP, WARM_UP_HEAD
from specactor.config.train import linear_decay
from specactor.data.dataset import Dataset
from specactor.data.tiny_model import make_tiny_model
from specactor.errors import ConfigError
from specactor.hooks import hook
from specactor.parallel.collective import Collective, control_group
from specactor.parallel.layout import Layout, has_mtp
from specactor.progress import Progress
from specactor.run_folder import WARM_UPS, RunFolder
from specactor.trainer.drafter import init
from specactor.trainer.drafter.buffer import TrainingExample, example_from
from specactor.trainer.drafter.command import learn
from specactor.trainer.drafter.head import Eagle3Start, make_head
from specactor.trainer.drafter.train import RefreshStats
from specactor.trainer.policy import PolicyTrainer
from specactor.types import Problem, TrainSequence

Solver = Callable[[Problem, random.Random, int], str | Sequence[tuple[str, bool]]]
"""Returns a response, or its parts and whether each is learned from: an environment's is not."""

BATCH_SIZE = 32
"""Worked solutions per step."""
DRAFT_BATCHES = 64
"""Of `BATCH_SIZE` worked solutions, for a draft model."""
DRAFT_UPDATES, HEAD_UPDATES = 250, 320
"""Of a layer that begins with the policy's weights, and of a head: 40 s on two cores."""
DRAFT_LIMIT_S = 60.0
"""A slower machine gets a draft model that has learned less."""


def initial_model(config: Config, collective: Collective) -> Path:
    """Return the model's folder; rank 0 makes an uncached tiny one."""
    if config.model.tiny is None:
        return Path(config.model.path)
    tiny = config.model.tiny
    folder = Path(config.output_dir, WARM_UPS) / f"model-{_hash(asdict(tiny), config.seed)}"

    def make() -> Path:
        if not folder.exists():
            try:
                make_tiny_model(tiny, config.seed, folder)
            except (ConfigError, OSError):
                if not folder.exists():  # else another run has made the same model meanwhile
                    raise
        return folder

    collective.path_of_first("making the model", make)
    return folder


def _is_made(folder: Path, collective: Collective) -> bool:
    """Say whether rank 0 sees the folder; then all ranks do. Collective."""
    return collective.path_of_first(folder.name, lambda: folder if folder.exists() else None) is not None


def first_model(
    config: Config,
    make: Callable[[], Path],
    start: Path,
    collective: Collective,
    progress: Progress,
    *,
    folder: RunFolder,
    resume: Path | None,
) -> Path:
    """Return the folder of the model that the run starts from, and record it; of a run that is resumed or replayed, the
    recorded one, whatever the settings of this start would `make` of the model in `start`. Collective."""

    def recorded() -> Path | None:
        if resume is None and not folder.replay.exists():
            return None
        source = folder
        if resume is not None and resume.resolve().parent != folder.checkpoints.resolve():
            source = RunFolder(root=resume.absolute().parent.parent)  # not resolved: it may be a link to another disk
        known = source.read_base()
        if known is not None and _architecture(known) == _architecture(start):
            return known
        if known is not None or config.warmup.solver:
            progress.note(
                f"The model that the run started from ({known or 'not recorded'}) is not there, or is another: that of "
                "these settings takes its place, also as the KL penalty's reference."
            )
        return None

    base = collective.path_of_first("base model", recorded)
    if base is None:
        base = make()
    collective.together("base model", lambda: folder.write_base(base) if collective.rank == 0 else None)
    return base


def _architecture(model: Path) -> dict[str, Any] | None:
    """Return what config.json says but for the weights' type; None where there is none."""
    try:
        fields: dict[str, Any] = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return {name: value for name, value in fields.items() if name not in {"dtype", "torch_dtype"}}


def warmed_up_model(
    config: Config,
    layout: Layout,
    start: Path,
    problems: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    collective: Collective,
    progress: Progress,
) -> Path:
    """Return the model's folder after the warm-up, which runs where it is not cached. Collective."""
    if not config.warmup.solver:
        return start
    solver = find_solver(config.warmup.solver)
    recipe = {**asdict(config.warmup), "batch_size": BATCH_SIZE}
    source = Path(inspect.getfile(solver)).read_text()
    train = config.train
    optimizer = (train.weight_decay, train.adam_betas, train.grad_clip, config.model.dtype)
    # An MTP layer learns at the rollouts' temperature.
    temperature = config.rollout.temperature if has_mtp(_architecture(start) or {}) else None
    key = _key(
        *(start, collective, recipe, config.seed, problems.digest, config.rollout.max_new_tokens, source),
        *(optimizer, asdict(layout), temperature),
    )
    folder = Path(config.output_dir, WARM_UPS) / f"warmup-{key}"
    if _is_made(folder, collective):
        return folder
    trainer = PolicyTrainer(config, layout, start)
    total = sum(config.warmup.steps)
    for done, (stage, rate) in enumerate(_rates(config)):
        batch = solved_batch(config, problems, solver, tokenizer, stage=stage, step=done)
        loss = trainer.supervised_step(batch, learning_rate=rate)
        progress.count(done + 1, total, loss=loss)
    if not _is_made(folder, collective):  # else another run has made the same model meanwhile, and may be reading it
        trainer.export_hf(folder)
        collective.path_of_first(folder.name, lambda: folder)
    return folder


def with_draft_model(
    config: Config,
    policy: Path,
    problems: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    collective: Collective,
    progress: Progress,
) -> Config:
    """Return the config with a draft model of the warm-up, where it asks for one: a policy layer, or a head.
    Collective."""
    rollout = config.rollout
    wanted = rollout.speculation.first_draft_model
    if wanted not in {*MADE_BY_WARM_UP} & rollout.speculation.in_use:
        return config
    if wanted == WARM_UP_HEAD:  # it learns from the policy's own probabilities, of a tiny vocabulary all
        settings, updates = DraftTrainingConfig(learning_rate=3e-3, top_k=128), HEAD_UPDATES
    else:  # these would take a pass over all examples, which lasts longer than learning from the samples
        settings = DraftTrainingConfig(learning_rate=config.distillation.learning_rate, top_k=0)
        updates = DRAFT_UPDATES
    settings = replace(settings, tokens_per_update=2048)  # docs/results/quickstart_speed.md measures the draft model
    learning = (wanted, updates, DRAFT_BATCHES, asdict(settings), rollout.temperature, collective.world)
    folder = Path(config.output_dir, WARM_UPS) / f"draft-{_key(policy, collective, config.seed, learning)}"
    if not _is_made(folder, collective):
        progress.note(f"a draft model learns for {DRAFT_LIMIT_S:.0f} s at most")
        examples = collective.together("worked solutions", lambda: _solved(config, problems, tokenizer))
        stats = _distil(
            policy, examples, settings, folder, collective, wanted=wanted, updates=updates, seed=config.seed
        )
        collective.path_of_first(folder.name, lambda: folder)
        progress.note(f"it made {stats.updates} of {updates} updates in {stats.seconds:.0f} s")
    speculation = rollout.speculation.with_first(str(folder))
    return replace(config, rollout=replace(rollout, speculation=speculation))


def _solved(config: Config, problems: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[TrainingExample]:
    solver, stages = find_solver(config.warmup.solver), len(config.warmup.steps)
    # Of all stages: what the policy was shown first it falls back to as it learns.
    sequences = [
        sequence
        for step in range(DRAFT_BATCHES)
        for sequence in solved_batch(config, problems, solver, tokenizer, stage=step % stages, step=step)
    ]
    return [example_from(s, None, version=0, temperature=config.rollout.temperature) for s in sequences]


def _distil(
    policy: Path,
    examples: Sequence[TrainingExample],
    settings: DraftTrainingConfig,
    folder: Path,
    collective: Collective,
    *,
    wanted: str,
    updates: int,
    seed: int,
) -> RefreshStats:
    """Distil a draft model on the examples, and write it to `folder` on rank 0. Collective."""
    init.quiet()

    def make() -> tuple[Any, Any]:
        if wanted != WARM_UP_HEAD:
            return None, init.new_draft(policy, init.TargetStart())
        target = init.read_model(policy)
        return target, make_head(target, Eagle3Start())

    target, model = collective.together("draft model", make)
    group = (control_group() or dist.group.WORLD) if collective.world > 1 else None
    stats = learn(target, model, examples, settings, seed=seed, limit_s=DRAFT_LIMIT_S, updates=updates, group=group)

    def write() -> None:
        if collective.rank == 0 and not folder.exists():  # else another run has made the same meanwhile
            init.write_model(model, folder, tokenizer=policy)

    collective.together("draft model", write)
    return stats


def find_solver(path: str) -> Solver:
    """Return the function at ``module:function``. Raises ConfigError when there is none."""
    return hook("warmup.solver", path)


def solved_batch(
    config: Config,
    problems: Sequence[Problem],
    solver: Solver,
    tokenizer: PreTrainedTokenizerBase,
    *,
    stage: int,
    step: int,
) -> list[TrainSequence]:
    """Return `BATCH_SIZE` worked solutions of seed, stage and step."""
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
    for stage, (steps, peak) in enumerate(zip(config.warmup.steps, config.warmup.learning_rates, strict=True)):
        for step in range(steps):
            yield stage, linear_decay(step, steps, peak)


def _key(model: Path, collective: Collective, *parts: object) -> str:
    """Return rank 0's hash of the model's files and the parts, on all ranks. Collective."""
    # All bytes: a fine-tune may leave most weights as they were, and samples would miss what it changed. Of 60 GB that
    # takes one rank a minute or two, at a start that loads the same files; SHA-256, since processors have it built in.
    own = collective.together(
        "reading the model", lambda: _hash(_digests(model), *parts) if collective.rank == 0 else ""
    )
    return collective.gather(own, str)[0]


def _digests(model: Path) -> list[tuple[str, str]]:
    found = []
    for file in sorted(file for file in model.iterdir() if file.is_file()):
        with file.open("rb") as stream:
            found.append((file.name, hashlib.file_digest(stream, "sha256").hexdigest()))
    return found


def _hash(*parts: object) -> str:
    return hashlib.blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=8).hexdigest()
