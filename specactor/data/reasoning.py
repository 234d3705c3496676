"""reasoning-gym: problems of a task, and the task's own scoring."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from specactor.config.data import NOT_DOWNLOADED
from specactor.errors import ConfigError, DataError, did_you_mean
from specactor.types import Problem

Entry = dict[str, Any]  # a problem as reasoning-gym makes it: question, answer, metadata


def create_task(task: str, params: Mapping[str, object], *, size: int, seed: int) -> Any:
    """Return a reasoning-gym data set of `size` entries; entry i is drawn with seed + i. Raises ConfigError for a
    refused task, parameter or value."""
    if task not in DATASETS:
        elsewhere = f"See the list of tasks of reasoning-gym. {NOT_DOWNLOADED}"
        remedy = f"A folder is named ./{task}." if Path(task).exists() else did_you_mean(task, DATASETS, elsewhere)
        raise ConfigError.at("data.train, data.eval", task, "the name of a reasoning-gym task", remedy)
    known = [item.name for item in fields(DATASETS[task][1])]
    for name in params:
        if name in ("size", "seed"):
            remedy = "Leave it out: seeds are such that no held-out problem is learned from."
            raise ConfigError.at("data.params", name, "a parameter of the task", remedy)
        if name not in known:
            raise ConfigError.at(
                "data.params",
                name,
                f"a parameter of {task} ({', '.join(known)})",
                did_you_mean(name, known, "Leave it out."),
            )
    try:
        return reasoning_gym.create_dataset(task, size=size, seed=seed, **params)
    except (AssertionError, TypeError, ValueError) as error:  # what the tasks' own validation raises
        raise ConfigError.at(
            "data.params", dict(params), f"values that {task} accepts", f"reasoning-gym says: {error}."
        ) from error


def score(answer: str, problem: Problem) -> float:
    """Return the task's own score: 0 where it raises on a text but accepts the problem's own answer; else the error is
    raised."""
    task, params, entry = _of(problem)
    score_answer = _scorer(task, json.dumps(params, sort_keys=True))
    try:
        return score_answer(answer, entry)
    except Exception:  # the scorers' parsing raises ValueError, KeyError and more, undocumented
        if entry["answer"] is None or score_answer(entry["answer"], entry) < 1.0:
            raise
        return 0.0


def unscorable(problem: Problem) -> str | None:
    try:
        task, params, entry = _of(problem)
        create_task(task, params, size=1, seed=0)
    except (DataError, ConfigError) as error:
        return str(error)
    for name, kind in (("question", str), ("answer", str | None), ("metadata", dict)):
        if name not in entry or not isinstance(entry[name], kind):
            return f"entry: {name} is missing or of a wrong type. Write the whole reasoning-gym entry"
    return None


def _of(problem: Problem) -> tuple[str, dict[str, object], Entry]:
    entry = problem.metadata.get("entry")
    if not isinstance(entry, dict):
        raise DataError("entry: missing, expected the reasoning-gym entry (question, answer, metadata)")
    params = problem.metadata.get("params") or {}
    if not isinstance(params, dict):
        raise DataError("params: expected an object with the parameters of the reasoning-gym task")
    source = entry.get("metadata")
    task = problem.metadata.get("task") or (source.get("source_dataset") if isinstance(source, dict) else None)
    if not isinstance(task, str):
        raise DataError("task: missing, expected the name of a reasoning-gym task")
    return task, params, entry


@lru_cache(maxsize=64)
def _scorer(task: str, params: str) -> Callable[[str, Entry], float]:
    scorer: Callable[[str, Entry], float] = create_task(task, json.loads(params), size=1, seed=0).score_answer
    return scorer
