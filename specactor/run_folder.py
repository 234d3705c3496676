"""The files of a run, and the rule for starting in its folder again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerBase

from specactor.config import Config
from specactor.config.rules import flat
from specactor.errors import CheckpointError, ConfigError
from specactor.trace import Span, chrome_trace
from specactor.trainer import checkpoint
from specactor.types import ScoredGroup

KEPT_EVALUATIONS = 100  # of each held-out set, the newest, beside the first: one may have a hundred megabytes
WARM_UPS = ".warm-up"  # in `output_dir`: models that warm-ups made, by the hash of all that went in


@dataclass(frozen=True, kw_only=True)
class Status:
    phase: str  # as the progress display names it; "" between two phases, "done" after the last
    step: int  # finished RL steps: those with a line in ``metrics.jsonl``
    steps: int
    rank_pids: tuple[int, ...]  # process of every trainer rank, on its machine


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What is run again of another run."""

    step: int  # the last
    alone: tuple[str, ...] = ()
    """Groups ("3") and responses ("3.1") of that step that alone are run, one by one; they are not learned from."""


class RunFolder:
    def __init__(self, *, root: Path) -> None:
        self.root = root
        self.metrics = root / "metrics.jsonl"
        self.checkpoints = root / "checkpoints"
        self.replay = root / "replay.json"
        self.base = root / "base.json"
        self.export = root / "export"
        self.engines = root / "engines"
        self.status = root / "status.json"
        self.draft_model = root / "draft_model"

    @classmethod
    def of(cls, config: Config) -> RunFolder:
        return cls(root=Path(config.output_dir) / config.name)

    def read_replay(self) -> Replay | None:
        if not self.replay.exists():
            return None
        return msgspec.json.decode(self.replay.read_bytes(), type=Replay)

    def write_base(self, model: Path) -> None:
        """Record the model that the run starts from."""
        self._replace(self.base, {"model": str(model.absolute())})  # it is read from other folders, too

    def read_base(self) -> Path | None:
        """Return the model that the run started from; None where no record says so, or nothing made it: then
        `model.path` names it."""
        try:
            model = Path(json.loads(self.base.read_text())["model"])
        except (OSError, ValueError, LookupError, TypeError):
            return None
        if model.parent.name != WARM_UPS:
            return None
        beside = self.root.parent / WARM_UPS / model.name  # runs may have moved, or be named from elsewhere
        return beside if beside.exists() else model

    def write_status(self, status: Status) -> None:
        """Replace it, whole, without forcing it to the disk."""
        self._replace(self.status, asdict(status))

    def _replace(self, file: Path, content: dict[str, Any]) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        fresh = file.with_name(f"{file.name}.tmp")
        fresh.write_text(json.dumps(content) + "\n")
        fresh.replace(file)

    def read_status(self) -> Status | None:
        """Return the run's status; None before its first phase."""
        try:
            return msgspec.json.decode(self.status.read_bytes(), type=Status)
        except FileNotFoundError:
            return None

    def trace(self, step: int, host: int = 0) -> Path:
        """Return an RL step's trace file on one host; host 0's has no number."""
        return self.root / "traces" / (f"step-{step:06}" + (f"-host-{host}" if host else "") + ".json")

    def write_traces(self, step: int, spans: Sequence[Mapping[str, Sequence[Span]]]) -> None:
        for host, processes in enumerate(spans):
            file = self.trace(step, host)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(chrome_trace(processes))

    def evaluation(self, step: int, name: str = "eval") -> Path:
        """Return the file of a set's held-out responses after `step` RL steps, a JSON object per line."""
        return self.root / "evaluations" / f"step-{step:06}{'' if name == 'eval' else f'-{name}'}.jsonl"

    def remove_partial_exports(self) -> None:
        """Remove what a run that was killed left of its export. For the run's owner alone."""
        for left in self.root.glob(f"{self.export.name}.tmp-*"):
            shutil.rmtree(left, ignore_errors=True)

    def write_evaluation(
        self,
        step: int,
        groups: Sequence[ScoredGroup],
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str = "eval",
        temperature: float = 0.0,
    ) -> None:
        lines = (
            {
                "problem": group.problem.index,
                "prompt": group.problem.prompt,
                "prompt_ids": list(trajectory.prompt_ids),  # an environment may have said something else
                "answer": group.problem.answer,
                "response": tokenizer.decode(list(trajectory.token_ids), skip_special_tokens=True),
                "token_ids": list(trajectory.token_ids),
                "temperature": temperature,
                "score": score,
            }
            for group in groups
            for trajectory, score in zip(group.trajectories, group.scores, strict=True)
        )
        file = self.evaluation(step, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w") as out:
            out.writelines(json.dumps(line) + "\n" for line in lines)
        older = sorted(file.parent.glob(self.evaluation(0, name).name.replace("000000", "[0-9]" * 6, 1)))
        for path in older[1:-KEPT_EVALUATIONS]:
            path.unlink(missing_ok=True)


def changed_settings(checkpoint_dir: Path, config: dict[str, Any]) -> list[str]:
    """Return what a resume changes, one "NAME OLD -> NEW" per setting, by the config.json of the checkpoint's run; []
    where that cannot be read. `config` is JSON."""
    try:
        before = json.loads((checkpoint_dir.parent.parent / "config.json").read_text())
    except (OSError, ValueError):
        return []
    if not isinstance(before, dict):
        return []
    of_place = dict.fromkeys(("name", "output_dir", "resume"))
    old, new = flat(before | of_place), flat(config | of_place)
    pairs = ((name, old.get(name, "nothing"), new.get(name, "nothing")) for name in old | new)
    return [f"{name} {was} -> {now}" for name, was, now in pairs if was != now]


def _last_resume(folder: RunFolder) -> object:
    """Return what `resume` was when the run last began to train; None where that cannot be read."""
    try:
        return json.loads((folder.root / "config.json").read_text())["resume"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def checkpoint_to_resume(config: Config, folder: RunFolder) -> Path | None:
    """Return the checkpoint that `config.resume` asks for, or the newest since it did; None: step 0. Raises ConfigError
    for an existing run without resume, CheckpointError for a missing one. For the run's owner alone."""
    if config.resume == "off":
        if folder.metrics.exists():
            raise ConfigError.at(
                "name",
                config.name,
                f"a run that does not exist yet in {config.output_dir}",
                "Continue it with --resume auto, choose another --name, or remove the folder.",
            )
        return None
    # The same command again, as launchers give it after a failure, goes on where the run has come to.
    if config.resume == "auto" or config.resume == _last_resume(folder):
        newest = checkpoint.latest(folder.checkpoints)
        if newest is not None or config.resume == "auto":
            return newest
    path = Path(config.resume)
    if not path.is_dir():
        raise CheckpointError(
            f"resume: got {config.resume!r}, expected off, auto or the folder of a checkpoint. "
            f"Checkpoints of this run are in {folder.checkpoints}."
        )
    return path
