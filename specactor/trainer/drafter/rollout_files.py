"""Rollouts on disk, for a draft model to learn from offline: one JSON object per line, or the records of a run.

    {"prompt_ids": [..], "token_ids": [..], "version": 7, "reward": 1.0, "temperature": 1.0}

`token_ids` is the response. Version, reward and temperature (1) may be missing; other fields are ignored. Of records
the samples that are kept whole are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from specactor.errors import DataError
from specactor.replay import records
from specactor.trainer.drafter.buffer import TrainingExample


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


def read_rollouts(paths: Sequence[Path]) -> list[RolloutLine]:
    """Read files, and all ``*.jsonl`` and ``step-*.bin`` in folders, by name; responses without tokens are left out.
    Raises DataError for a line or a file that is none, and when there is nothing to learn from."""
    files = [
        file
        for path in paths
        for file in (sorted([*path.rglob("*.jsonl"), *path.rglob("step-*.bin")]) if path.is_dir() else [path])
    ]
    lines = [line for file in files for line in (_recorded(file) if file.suffix == ".bin" else _lines(file))]
    if not (found := [line for line in lines if line.prompt_ids and line.token_ids]):
        raise DataError(f"{', '.join(map(str, paths))}: got no response with tokens, expected some. Give other files.")
    return found


def _recorded(file: Path) -> Iterator[RolloutLine]:
    record = records.read(file)
    for sample in record.samples:
        yield RolloutLine(
            prompt_ids=sample.prompt_ids.tolist(),
            token_ids=sample.token_ids.tolist(),
            version=sample.spans[-1][0] if sample.spans else 0,
            reward=sample.reward,
            temperature=record.config["rollout"]["temperature"],
        )


def _lines(file: Path) -> Iterator[RolloutLine]:
    decoder = msgspec.json.Decoder(RolloutLine)
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}). Give files or folders of JSON lines.") from error
    for number, raw in enumerate(lines, 1):
        try:
            yield decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DataError(
                f"{file}:{number}: got {error}, expected an object with prompt_ids and token_ids. "
                "Give files of rollouts."
            ) from error


def write_rollouts(file: Path, lines: Iterable[RolloutLine]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab") as stream:
        for line in lines:
            stream.write(msgspec.json.encode(line) + b"\n")
