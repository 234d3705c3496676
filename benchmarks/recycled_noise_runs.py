"""Short runs of many epochs over a few problems, whose noise is kept for some visits, and how they are started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import examples.calculator
from benchmarks.trained_models import ROOT, task_recipe
from specactor.config import Config, ParallelConfig
from specactor.metrics import Value, read_metrics
from specactor.run_folder import WARM_UPS, RunFolder

TASKS = ("bits", "calculator")
SEEDS = (0, 1, 2)
VISITS = (1, 2, 4)
LEARNING_RATES = {"bits": 2e-5, "calculator": 1.5e-5}
"""With which most of the gain comes after the first epoch: only then is noise seen again."""
PROBLEMS, PER_STEP, GROUP_SIZE, STEPS = 64, 8, 8, 64
EPOCH = PROBLEMS // PER_STEP  # steps
WINDOW = 4
DRAFTING = (
    *("--rollout.speculation.mode", "coupled", "--rollout.speculation.drafters", "previous"),
    *("--rollout.speculation.window", str(WINDOW)),
)
LIMIT_S = 400.0


def bits() -> Config:
    return _small("bits", task_recipe("A"))


def calculator() -> Config:
    """In conversations of two turns."""
    return _small("calculator", examples.calculator.recipe())


def sums() -> Config:
    """Which two layers cannot learn; an engine's speed is measured on them, since they leave most entropy."""
    recipe = task_recipe("B")
    data = replace(recipe.data, params={**recipe.data.params, "max_terms": 4})
    return _small("sums", replace(recipe, data=data, warmup=replace(recipe.warmup, steps=(1000, 150))))


RECIPES = {"bits": bits, "calculator": calculator, "sums": sums}


def few_products() -> Iterator[dict[str, str]]:
    return examples.calculator.problems(0, PROBLEMS)


def _small(name: str, recipe: Config) -> Config:
    """Two layers of the quickstart's model, on one core."""
    return replace(
        recipe,
        name=name,
        model=replace(recipe.model, path="tiny:2"),
        parallel=ParallelConfig(),
        rollout=replace(recipe.rollout, prompts_per_step=PER_STEP, group_size=GROUP_SIZE),
        train=replace(recipe.train, steps=STEPS, learning_rate=LEARNING_RATES.get(name, 2e-5)),
        checkpoint=replace(recipe.checkpoint, every=EPOCH, keep=1, export=False),
        resume="auto",
        eval=replace(recipe.eval, problems=256, every=2 * EPOCH),
        tracking=replace(recipe.tracking, wandb="off", record="off"),
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that learns from `PROBLEMS` problems, epoch after epoch."""

    task: str
    visits: int
    seed: int
    drafts: bool = True

    @property
    def name(self) -> str:
        return f"{self.task}-{self.visits}-{self.seed}{'' if self.drafts else '-plain'}"

    def folder(self, base: Path) -> Path:
        return base / self.task / self.name

    def lines(self, base: Path) -> Sequence[Mapping[str, Value]]:
        """What it measured; none before it has ended."""
        lines = read_metrics(self.folder(base)) if self.folder(base).exists() else []
        return lines if lines and int(lines[-1]["step"]) == STEPS else []


def all_runs() -> Iterator[Run]:
    """The learning curves, seed by seed, and after the first seed one run per task that drafts nothing."""
    for seed in SEEDS:
        for task in TASKS:
            yield from (Run(task=task, visits=visits, seed=seed) for visits in VISITS)
            if seed == 0:
                yield Run(task=task, visits=VISITS[-1], seed=0, drafts=False)


def start_of(task: str, base: Path) -> Path:
    """The folder of the model after the warm-up, from which all runs of a task begin."""
    found = [*(base / task / WARM_UPS).glob("warmup-*")]
    if not found:
        launch(task, base / task / "warm-up", "--train.steps", "1", "--eval.problems", "0")
        found = [*(base / task / WARM_UPS).glob("warmup-*")]
    [folder] = found
    return folder


def perform(run: Run, base: Path) -> None:
    """Raises CalledProcessError when it fails, TimeoutExpired when it takes too long."""
    drafting = DRAFTING if run.drafts else ()
    launch(run.task, run.folder(base), *_settings(run, base), *drafting)


def one_epoch_on(task: str, base: Path, rate: float) -> Path:
    """The folder of what `start_of` is after one epoch at this learning rate."""
    folder = base / task / f"one-epoch-{rate}"
    export = RunFolder(root=folder).export
    if not export.exists():
        further = ("--train.steps", str(EPOCH), "--train.learning-rate", str(rate), "--checkpoint.export", "True")
        launch(task, folder, *_settings(Run(task=task, visits=1, seed=0), base), *further)
    return export


def _settings(run: Run, base: Path) -> list[str]:
    if run.task == "calculator":
        few = ["--data.train", f"{__name__}:{few_products.__name__}"]
    else:
        params = {**RECIPES[run.task]().data.params, "size": PROBLEMS}
        few = ["--data.params", *(f"{name}={value}" for name, value in params.items())]
    return [
        *("--model.path", str(start_of(run.task, base)), "--warmup.solver", "", "--seed", str(run.seed)),
        *("--warmup.steps", "--warmup.learning-rates"),
        *few,
        *("--rollout.noise-visits", str(run.visits)),
    ]


def launch(recipe: str, folder: Path, *settings: str) -> RunFolder:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
        *(str(ROOT / "launch" / "train_moe.py"), f"{__file__}:{recipe}", "--name", folder.name),
        *("--output-dir", str(folder.parent), *settings),
    ]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.log").open("w") as log:
        subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            timeout=LIMIT_S,
            check=True,
        )
    return RunFolder(root=folder)
