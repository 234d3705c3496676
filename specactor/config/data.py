"""The section `data` of a recipe. PURE.

Invariant: held-out problems of a task are not learned from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal

from specactor.config.rules import is_template, require, rules_of

EVAL_SEED = 10_000_000
"""Of the generator of held-out problems; that of training problems has 0. reasoning-gym draws problem i with seed + i,
so two sources share no problem as long as each has fewer than this."""

NOT_DOWNLOADED = "Nothing is downloaded: save it with the save_to_disk of datasets, or give module:function."


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Where problems of one set come from: a task, or a path."""

    task: str = ""
    """Name of a reasoning-gym task, for example count_bits."""
    params: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Parameters of the reasoning-gym task."""
    path: str = ""
    """A .jsonl or .parquet file, or a folder of datasets, with columns prompt, answer and verifier, or module:function
    that returns such rows."""
    size: int = 10_000
    """Number of problems drawn from a task."""
    seed: int = 0
    """Of the task's generator."""
    prompt_template: str = "{prompt}"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Problems to learn from, and problems held out."""

    train: str
    """Problems to learn from: a .jsonl or .parquet file, or a folder that Hugging Face's datasets saved to disk, with
    columns prompt, answer and verifier (./NAME where it has neither dot nor slash), module:function that returns such
    rows, or the name of a reasoning-gym task, for example count_bits."""
    mix: dict[str, float] = field(default_factory=dict)
    """Further sets to learn from, named likewise, and how many of their problems are drawn per problem of train. Other
    numbers at a resume hold from there on."""
    eval: tuple[str, ...] = ()
    """Problems held out, likewise; none: others of the task that is learned. The metrics of the first set are named
    eval, those of further ones after their file, function or task."""
    params: dict[str, str | int | float | bool] = field(default_factory=dict)
    """Parameters of the reasoning-gym task; size: problems to learn from, 10,000 where it is not given. Files and
    functions have none."""
    prompt_template: str = "{prompt}"
    """The prompt that the model sees. {prompt} stands for the problem's own text, any other {name} for an entry of a
    task's metadata (count_bits has {number}) or a column of a file, {name:compact} for its text without blanks (7 + 4
    becomes 7+4); {{ and }} for braces."""
    order: Literal["shuffled", "source", "curriculum"] = "shuffled"
    """shuffled: anew in every epoch; source: as in their source, epoch after epoch, as a curriculum in a file needs;
    curriculum: shuffled, and drawn with the chance 4 p (1 - p), .1 at least, where p is a problem's success rate when
    it was last tried: its mean score, in the range of those of its set where they are not within 0..1."""

    @property
    def has_task(self) -> bool:
        return not all(map(is_file, (self.train, *self.mix, *self.eval)))

    @property
    def train_source(self) -> SourceConfig:
        return self._source(self.train, size=self._size, seed=0)

    @property
    def mixed_sources(self) -> list[SourceConfig]:
        return [self._source(name, size=self._size, seed=0) for name in self.mix]

    def eval_sources(self, problems: int) -> dict[str, SourceConfig]:
        """Return every set's source with so many held-out problems, or all of its file; the first is named eval."""
        names = self.eval or (self.train,)
        keys = ["eval", *map(set_name, names[1:])]
        return {key: self._source(name, size=problems, seed=EVAL_SEED) for key, name in zip(keys, names, strict=True)}

    def _source(self, name: str, *, size: int, seed: int) -> SourceConfig:
        if is_file(name):
            return SourceConfig(path=name, prompt_template=self.prompt_template)
        params = {key: value for key, value in self.params.items() if key != "size"}
        return SourceConfig(task=name, params=params, size=size, seed=seed, prompt_template=self.prompt_template)

    @property
    def _size(self) -> int:
        size = self.params.get("size", 10_000)
        ok = type(size) is int and 1 <= size <= EVAL_SEED
        require(ok, "data.params.size", size, f"1..{EVAL_SEED}", "Problems beyond these are held out.")
        return int(size)

    def __post_init__(self) -> None:
        if isinstance(self.eval, str):  # as recipes wrote it when there was one
            object.__setattr__(self, "eval", (self.eval,) if self.eval else ())
        rule = rules_of(self, "data")
        names = ["train", "eval", *map(set_name, self.eval[1:])]  # accuracy/train is of what is learned from
        rule(
            "eval",
            len({*names}) == len(names) and all(names),
            "sets with names of their own",
            "The name of a further set is that of its file, function or task, other than train and eval. Rename one, "
            "or name it first.",
        )
        rule("train", bool(self.train), "a .jsonl or .parquet file, or the name of a reasoning-gym task", "Give one.")
        rule(
            "eval",
            self.train not in self.eval or not is_file(self.train),
            "files other than data.train",
            "Held-out problems must not be trained on.",
        )
        for name, weight in self.mix.items():
            require(weight > 0, f"data.mix.{name}", weight, "> 0", "Leave the set out, or give it a weight.")
            require(
                name not in (self.train, *self.eval), "data.mix", name, "other sets than train and eval", "Drop it."
            )
        assert self._size
        rule(
            "prompt_template",
            is_template(self.prompt_template),
            "a text with {prompt}, or the {name} of a task's metadata or of a column",
            "Put {prompt} where the problem's text belongs, and write {{ and }} for braces.",
        )


def set_name(source: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", PurePosixPath(source.rpartition(":")[2]).stem)


def is_file(name: str) -> bool:
    """Return whether it names no task: tasks' names are identifiers."""
    return not name.isidentifier()
