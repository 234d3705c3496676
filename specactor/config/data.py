"""The section `data` of a recipe: problems to learn from, and problems held out. PURE.

That the two share no problem is checked in `specactor.config.run`, which sees both.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specactor.config.rules import is_template, require


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Where problems come from: a reasoning-gym task, or a JSONL or parquet file."""

    task: str = ""
    """Name of a reasoning-gym task, for example count_bits."""
    params: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Parameters of the reasoning-gym task."""
    path: str = ""
    """A .jsonl or .parquet file with columns prompt, answer and verifier."""
    size: int = 10_000
    """Number of problems drawn from a task."""
    seed: int = 0
    """Of the task's generator. Seeds closer than ``size`` share problems: keep them far apart."""
    prompt_template: str = "{prompt}"
    """The prompt that the model sees. {prompt} stands for the problem's own text, any other {name} for an entry of a
    task's metadata (count_bits has {number}) or a column of a file; {{ and }} for braces."""
    remove_spaces: bool = False
    """Leave the blanks out of every finished prompt: 7 + 4 becomes 7+4."""

    def __post_init__(self) -> None:
        require(
            bool(self.task) != bool(self.path),
            "data.*.task",
            self.task,
            "exactly one of task and path",
            "Name a reasoning-gym task, or give a .jsonl or .parquet file.",
        )
        require(self.size >= 1, "data.*.size", self.size, ">= 1", "Ask for at least one problem.")
        require(
            is_template(self.prompt_template),
            "data.*.prompt_template",
            self.prompt_template,
            "a text with {prompt}, or the {name} of a task's metadata or of a column",
            "Put {prompt} where the problem's text belongs, and write {{ and }} for braces.",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Problems to learn from, and problems held out."""

    train: SourceConfig
    eval: SourceConfig
    shuffle: bool = True
    """False: draw problems in the order of their source, epoch after epoch, as a curriculum in a file needs."""
