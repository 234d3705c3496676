"""Rollouts on disk, one JSON object per line: what a run wrote, for a draft model to learn from offline.

    {"prompt_ids": [..], "token_ids": [..], "version": 7, "reward": 1.0, "temperature": 1.0}

`token_ids` is the response. Version, reward and temperature (1) may be missing; other fields are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from specactor.errors import DataError
from specactor.trainer.drafter.buffer import TrainingExample
from specactor.types import ScoredGroup


class RolloutLine(msgspec.Struct, frozen=True, kw_only=True):
    prompt_ids: list[int]
    token_ids: list[int]  # of the response
    version: int = 0
    reward: float = 0.0
    temperature: float = 1.0


def example_of(line: RolloutLine) -> TrainingExample:
    return TrainingExample(
        token_ids=np.array([*line.prompt_ids, *line.token_ids], np.int32),
        prompt_len=len(line.prompt_ids),
        version=line.version,
        temperature=line.temperature,
    )


def lines_of(groups: Iterable[ScoredGroup], *, temperature: float) -> Iterator[RolloutLine]:
    for group in groups:
        for trajectory, reward in zip(group.trajectories, group.rewards, strict=True):
            yield RolloutLine(
                prompt_ids=list(trajectory.prompt_ids),
                token_ids=list(trajectory.token_ids),
                version=trajectory.spans[-1].version if trajectory.spans else 0,
                reward=reward,
                temperature=temperature,
            )


def read_rollouts(paths: Sequence[Path]) -> list[RolloutLine]:
    """Read files, and all ``*.jsonl`` in folders, by name; responses without tokens are left out. Raises DataError,
    which names the line, for one that is none, and when there is nothing to learn from."""
    decoder = msgspec.json.Decoder(RolloutLine)
    found = []
    for file in [file for path in paths for file in (sorted(path.rglob("*.jsonl")) if path.is_dir() else [path])]:
        try:
            lines = file.read_bytes().splitlines()
        except OSError as error:
            raise DataError(
                f"{file}: cannot be read ({error.strerror}). Give files or folders of JSON lines."
            ) from error
        for number, raw in enumerate(lines, 1):
            try:
                line = decoder.decode(raw)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise DataError(
                    f"{file}:{number}: got {error}, expected an object with prompt_ids and token_ids. "
                    "Give files of rollouts."
                ) from error
            if line.prompt_ids and line.token_ids:
                found.append(line)
    if not found:
        raise DataError(f"{', '.join(map(str, paths))}: got no response with tokens, expected some. Give other files.")
    return found


def write_rollouts(file: Path, lines: Iterable[RolloutLine]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as stream:
        for line in lines:
            stream.write(msgspec.json.encode(line) + b"\n")
