"""Targets and draft models for benchmarks, made once and kept under .cache/benchmarks.

    python -m benchmarks.trained_models [A] [B] [B-early] [heavy]

The target of a task is what the quickstart's warm-up leaves: a model that knows how to work and often guesses instead.
Its draft model is a dense layer that learned the target's own law of the next token. Task A (count_bits) leaves little
entropy, task B (sums) more of it, and after a short warm-up (B-early) most. The heavy pair has random weights: it is
for speed alone.

Invariant: a folder is named by the hash of what it is made of (recipe, sources of what is taught and how it is
learned, weights of the target) and appears under its name only when it is whole.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import msgspec

from benchmarks.recipes import HUNDRED_MILLION
from examples import quickstart, quickstart_tasks
from specactor.config import Config, SourceConfig
from specactor.cpu import sglang as cpu
from specactor.data.tiny_model import make_tiny_model
from specactor.recipes import to_json

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "benchmarks"
PROMPT_TEMPLATE = "{expression}="  # of sums, without their spaces
WARMUP_LIMIT_S, DISTILLATION_LIMIT_S = 1800.0, 900.0
"""On a busy machine; a quiet one needs 2-4 minutes and 1 minute."""

TAUGHT_BY = ("model", "data", "parallel", "warmup", "train", "seed")
"""Sections of a recipe that the warm-up depends on."""

Task = Literal["A", "B", "B-early"]


@dataclass(frozen=True, kw_only=True)
class Models:
    """Folders in Hugging Face format, with the same tokenizer."""

    target: Path
    draft: Path
    head: Path = Path()  # an EAGLE-3 head, where one was asked for


@dataclass(frozen=True, kw_only=True)
class HeadTraining:
    """How an EAGLE-3 head learns from sampled responses of its target."""

    sequences: int = 1536
    updates: int = 400
    tokens_per_update: int = 2048
    learning_rate: float = 3e-3
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """A dense Qwen3 model, and what it learns from; without sequences it stays random."""

    hidden_size: int = 128
    num_layers: int = 1
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 512
    sequences: int = 3072  # responses that are sampled from the target
    steps: int = 400
    batch_size: int = 64
    learning_rate: float = 6e-3
    seed: int = 0


def task_recipe(task: str) -> Config:
    """The quickstart, or the same on sums of 2-6 terms, with a warm-up after which it is able, or still unsure."""
    recipe = quickstart.plain()
    if task == "A":
        return recipe

    params: dict[str, str | int | float | bool] = {
        "min_terms": 2,
        "max_terms": 6,
        "min_digits": 1,
        "max_digits": 2,
        "operators": "+",
        "allow_parentheses": False,
        "allow_negation": False,
        "size": 20_000,
    }
    return replace(
        recipe,
        name="sums",
        data=replace(
            recipe.data,
            train="basic_arithmetic",
            params=params,
            prompt_template=PROMPT_TEMPLATE,
        ),
        warmup=replace(recipe.warmup, steps=(500, 150) if task == "B-early" else (1200, 200)),
    )


def task_models(task: Task) -> Models:
    """The pair of a task; made within a few minutes where it is not cached."""
    target = task_target(task)
    shape = DraftShape()
    recipe = task_recipe(task)
    learned_from = (asdict(recipe.data.train_source), recipe.rollout.max_new_tokens, _weights(target))
    parts = (asdict(shape), learned_from, _distillation())
    return Models(
        target=target, draft=cached(f"draft-{task}", parts, lambda folder: distil(target, folder, shape, task))
    )


def task_target(task: Task) -> Path:
    """The model after its warm-up."""
    recipe = to_json(task_recipe(task))
    sections = {name: recipe[name] for name in TAUGHT_BY}
    parts = (sections, recipe["rollout"]["max_new_tokens"], inspect.getsource(quickstart_tasks))
    return cached(f"target-{task}", parts, lambda folder: _warm_up(task, folder))


def head(target: Path, task: Task) -> Path:
    """An EAGLE-3 head for the target of a task."""
    how = HeadTraining()
    parts = (asdict(how), _weights(target), _distillation())
    return cached(f"head-{task}", parts, lambda folder: distil(target, folder, how, task))


def heavy_models() -> Models:
    """100 M parameters of a mixture of experts, and one dense layer; random weights."""
    target = cached(
        "target-heavy", (asdict(HUNDRED_MILLION),), lambda folder: make_tiny_model(HUNDRED_MILLION, 0, folder)
    )
    shape = DraftShape(hidden_size=256, head_dim=64, intermediate_size=1024, sequences=0, steps=0)
    parts = (asdict(shape), _weights(target), _distillation())
    return Models(target=target, draft=cached("draft-heavy", parts, lambda folder: distil(target, folder, shape, "A")))


def cached(name: str, parts: object, make: Callable[[Path], None]) -> Path:
    """The folder of what `parts` say; `make` fills one that does not exist yet."""
    key = hashlib.blake2b(msgspec.json.encode(parts, order="sorted"), digest_size=8).hexdigest()
    folder = CACHE / f"{name}-{key}"
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        print(f"making {folder.relative_to(ROOT)}", flush=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=CACHE))
        try:
            make(unfinished / "model")
            if not folder.exists():  # another process may have been faster
                os.rename(unfinished / "model", folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _weights(model: Path) -> str:
    """Digest of its weights."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(model.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _distillation() -> str:
    """Its source; comments and layout do not count."""
    return ast.dump(ast.parse((ROOT / "benchmarks" / "distillation.py").read_text()))


def _warm_up(task: Task, folder: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    script = ["-m", "benchmarks.trained_models_rank", task]
    said = _output(
        [*torchrun, "--nproc-per-node", str(task_recipe(task).parallel.expert), *script],
        {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"},
        WARMUP_LIMIT_S,
    )
    shutil.copytree(ROOT / said, folder)


def distil(
    target: Path, folder: Path, shape: DraftShape | HeadTraining, task: Task, problems: SourceConfig | None = None
) -> None:
    """Make a draft model or a head of the target in a folder that does not exist yet, on responses to the task's
    problems, or to others."""
    recipe = task_recipe(task)
    data = json.dumps(asdict(problems or recipe.data.train_source))
    max_new_tokens = str(recipe.rollout.max_new_tokens)
    kind = "head" if isinstance(shape, HeadTraining) else "layer"
    command = ["-m", "benchmarks.distillation", kind, str(target), str(folder), json.dumps(asdict(shape)), data]
    print("  " + _output([*command, max_new_tokens], cpu.environment(), DISTILLATION_LIMIT_S), flush=True)


def _output(command: list[str], environment: dict[str, str], limit_s: float) -> str:
    """What a Python process prints after RESULT. Raises RuntimeError, with the end of its errors, without it."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment | {"PYTHONPATH": _python_path(environment)},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return line.removeprefix("RESULT ")
    raise RuntimeError(f"{' '.join(command)} gave no result. Its end:\n{done.stderr[-3000:]}")


def _python_path(environment: dict[str, str]) -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])


def main() -> None:
    for name in sys.argv[1:] or [*get_args(Task), "heavy"]:
        if name != "heavy" and name not in get_args(Task):
            sys.exit(f"trained_models: got {name}, expected one of {', '.join(get_args(Task))}, heavy")
        models = heavy_models() if name == "heavy" else task_models(name)  # type: ignore[arg-type]
        print(f"{name}: target {models.target}, draft {models.draft}", flush=True)


if __name__ == "__main__":
    main()
