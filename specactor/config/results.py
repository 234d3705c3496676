"""What a run measures and leaves behind: the sections `checkpoint`, `eval` and `tracking` of a recipe. PURE."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from specactor.config.rules import rules_of


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Megatron distributed checkpoints of the whole training state."""

    every: int = 10
    """Save after every this many RL steps, and after the last; 0: only after the last."""
    keep: int = 2
    """Newest checkpoints that are kept."""
    export: bool = True
    """Write the final policy in Hugging Face format."""

    def __post_init__(self) -> None:
        rule = rules_of(self, "checkpoint")
        rule("every", self.every >= 0, ">= 0", "Use 0 to save only at the end.")
        rule("keep", self.keep >= 1, ">= 1", "At least the newest must be kept.")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Accuracy on held-out problems, before and after RL."""

    problems: int = 256
    """Held-out problems per evaluation, of each set; 0: no evaluation."""
    sets: tuple[str, ...] = ()
    """Further sets of held-out problems, named as data.eval is."""
    samples: int = 1
    """Responses per problem; 1: one, greedily; more: sampled as in training, for avg@k and pass@k."""
    every: int = 0
    """Also evaluate after every this many RL steps; 0: only before and after."""

    def __post_init__(self) -> None:
        rule = rules_of(self, "eval")
        rule("problems", self.problems >= 0, ">= 0", "Use 0 for no evaluation.")
        rule("every", self.every >= 0, ">= 0", "Use 0 for before and after only.")
        rule("samples", self.samples >= 1, ">= 1", "Use 1 for greedy responses.")
        names = [set_name(name) for name in self.sets]
        rule(
            "sets",
            len(set(names)) == len(names) and not {"", "eval"} & {*names},
            "sets with names of their own",
            "The name of a set is that of its file, function or task; rename one.",
        )


def set_name(source: str) -> str:
    """Return the name of a set of problems in metrics: its file's, function's or task's own."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", PurePosixPath(source.rpartition(":")[2]).stem)


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Metrics go to ``metrics.jsonl``, and to wandb."""

    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    """auto: online where a key is configured, else offline. The project is that of WANDB_PROJECT, or specactor."""
    record: Literal["off", "sampled", "full"] = "sampled"
    """What is kept of every step for ``specactor replay`` and ``specactor diff``: digests of all samples and weights,
    and tokens and log-probabilities of one sample in 16 (sampled), of all (full), or nothing (off)."""
    trace: tuple[int, ...] = ()
    """RL steps, from 1, of which the run's folder gets a trace for ui.perfetto.dev: the trainer's phases, and the
    rounds of engines with speculation and of drafter processes."""

    def __post_init__(self) -> None:
        rule = rules_of(self, "tracking")
        rule(
            "trace", all(step >= 1 for step in self.trace), "steps >= 1", "The first RL step is 1. Use () for no trace."
        )
