"""Runs of the quickstart whose draft models differ and whose tokens must not: how they are started and compared."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.disturbed_run import compared
from benchmarks.trained_models import ROOT
from specactor.metrics import Value, read_metrics
from specactor.replay import records
from specactor.run_folder import RunFolder

LENGTH = "speculation/model/accept_length"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One finished run."""

    name: str
    lines: Sequence[Mapping[str, Value]]  # of its RL steps
    tokens: str  # digest of all its responses and their rewards
    facts: Sequence[Mapping[str, Value]]  # of every step, what must not differ

    @classmethod
    def read(cls, name: str, root: Path) -> Run:
        folder = RunFolder(root=root)
        digest = hashlib.blake2b(digest_size=16)
        for step in records.steps_of(root):
            for sample in records.read(records.file_of(root, step)).samples:
                digest.update(sample.tokens + repr(sample.reward).encode())
        facts = [{k: v for k, v in line.items() if not k.startswith("drafter/")} for line in compared(folder)]
        lines = [line for line in read_metrics(root) if int(line["step"]) > 0]
        return cls(name=name, lines=lines, tokens=digest.hexdigest(), facts=facts)

    def total(self, *metrics: str) -> float:
        return sum(float(line.get(metric, 0.0)) for line in self.lines for metric in metrics)

    def lengths(self) -> list[tuple[int, float]]:
        """(step, accept_length)"""
        return [(int(line["step"]), float(line[LENGTH])) for line in self.lines if LENGTH in line]


def differences(runs: Sequence[Run]) -> list[str]:
    """What differs from the first run, and must not."""
    first, found = runs[0], []
    for run in runs[1:]:
        if run.tokens != first.tokens:
            found.append(f"{run.name}: responses or rewards differ from those of {first.name}")
        for here, there in zip(run.facts, first.facts, strict=True):
            names = sorted(name for name in {*here, *there} if repr(here.get(name)) != repr(there.get(name)))
            found += [f"{run.name}, step {here['step']}: {name}" for name in names]
    return found


def start(root: Path, settings: Sequence[str], recipe: str = "quickstart_plain") -> None:
    """Run a recipe, or continue it, into the folder `root`. Raises CalledProcessError when it fails.

    Held-out problems stay as in the recipe: the warm-up learns from all others, and the draft models are cut out of, or
    distilled on, what the recipe's warm-up leaves."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(str(ROOT / "launch" / "train_moe.py"), recipe, "--name", root.name, "--output-dir", str(root.parent)),
        *("--tracking.wandb", "off"),
        *("--checkpoint.every", "0", "--checkpoint.export", "False"),
        *("--distillation.tokens-per-update", "256"),
    ]
    subprocess.run([*command, *settings], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)


def refreshing(when: str, share: float) -> list[str]:
    """Settings of `distillation`."""
    return ["--distillation.refresh", str(share if when == "every_step" else 0)]


def drafting(draft: Path, window: int) -> list[str]:
    """In every engine, with a fixed window."""
    return [
        *("--rollout.speculation.mode", "coupled", "--rollout.speculation.drafters", "model"),
        *("--rollout.speculation.draft-model", str(draft), "--rollout.speculation.window", str(window)),
    ]
