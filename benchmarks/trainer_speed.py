"""Training tokens per second of the policy trainer and of a plain PyTorch loop, in turns on the same cores.

python -m benchmarks.trainer_speed [--models NAME ...] [--repetitions N]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks import trainer_speed_case as case
from benchmarks.results import Result, publish, spread
from specactor.data.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parent.parent
AIM = 0.9
COLUMNS = ("model", "cores", "contestant", "micro-batch", "tokens/s", "of plain")
LOSS_TOLERANCE = 1e-4
TRIES = 2  # steps per setting in the search for a contestant's best one; the faster counts


@dataclass(frozen=True)
class Entry:
    """A contestant."""

    name: str
    cores: int
    ranks: int = 1
    threads: int = 1
    parallel: dict[str, int] | None = None  # of the policy trainer; None: the plain loop


ENTRIES = (
    Entry("SpecActor, 1 process", 1, parallel={}),
    Entry("PyTorch, 1 thread", 1),
    Entry("SpecActor, 2 processes, EP2", 2, ranks=2, parallel={"expert": 2}),
    Entry("SpecActor, 2 processes, DP2", 2, ranks=2, parallel={}),
    Entry("PyTorch, 2 threads", 2, threads=2),
    Entry("PyTorch, 2 processes, gradients summed", 2, ranks=2),
)


@dataclass
class Contestant:
    """A running entry; computes only during `turn`."""

    entry: Entry
    folder: Path
    process: subprocess.Popen[bytes]
    settings: list[str] = field(default_factory=list)
    best: int = 0
    turns: int = 0
    seconds: list[float] = field(default_factory=list)

    def turn(self, setting: int | None) -> Any:
        """One step; None ends the contestant."""
        case.write_json(self.folder / f"turn-{self.turns}", {"setting": setting})
        if setting is None:
            self.process.wait(timeout=60)
            return None
        try:
            answer = case.await_json(self.folder / f"done-{self.turns}", lambda: self.process.poll() is None)
        except TimeoutError as error:
            log = (self.folder / "log.txt").read_text()[-3000:]
            raise SystemExit(f"{self.entry.name}: no answer. Its processes say:\n{log}") from error
        self.turns += 1
        return answer

    def choose(self) -> float:
        """Find the fastest setting; returns the loss of the first step, at the model's first weights."""
        self.settings = self.turn(0)["settings"]
        first = self.turn(0)["loss"]
        times = []
        for setting in range(len(self.settings)):
            times.append(min(self.turn(setting)["seconds"] for _ in range(TRIES)))
        self.best = times.index(min(times))
        return float(first)

    def stop(self) -> None:
        """End it, whatever it does. The ranks of torchrun are in sessions of their own."""
        if self.process.poll() is None:
            parent = psutil.Process(self.process.pid)
            for process in [*parent.children(recursive=True), parent]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()


def start(entry: Entry, model_dir: Path, folder: Path) -> Contestant:
    """The contestant's processes, in a session of their own."""
    folder.mkdir()
    python_path = [str(ROOT)] if entry.parallel is not None else [str(ROOT / "specactor/cpu/shims"), str(ROOT)]
    torchrun = ["-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    torchrun += ["--nproc-per-node", str(entry.ranks), "--module"]
    command = [sys.executable, *(torchrun if entry.parallel is not None or entry.ranks > 1 else ["-m"])]
    if entry.parallel is None:
        command += ["benchmarks.trainer_speed_plain", str(model_dir), str(folder)]
    else:
        command += ["benchmarks.trainer_speed_ours", str(model_dir), str(folder), json.dumps(entry.parallel)]
    environment = os.environ | {
        "OMP_NUM_THREADS": str(entry.threads),
        "PYTHONPATH": os.pathsep.join(python_path),
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Contestant(entry, folder, process)


def contest(model_dir: Path, folder: Path, repetitions: int) -> list[Contestant]:
    """All entries on one model; they have ended when this returns."""
    contestants: list[Contestant] = []
    try:
        losses = {}
        for number, entry in enumerate(ENTRIES):
            contestants.append(start(entry, model_dir, folder / str(number)))
            losses[entry.name] = contestants[-1].choose()
        if max(losses.values()) - min(losses.values()) > LOSS_TOLERANCE:
            raise SystemExit(f"the contestants do not minimise the same loss: {losses}")
        for contestant in contestants:
            contestant.turn(contestant.best)
        for repetition in range(repetitions):
            order = contestants if repetition % 2 == 0 else contestants[::-1]
            for contestant in order:
                contestant.seconds.append(contestant.turn(contestant.best)["seconds"])
        for contestant in contestants:
            contestant.turn(None)
    finally:
        for contestant in contestants:
            contestant.stop()
    return contestants


def rows(model: str, contestants: list[Contestant], tokens: int) -> list[list[str]]:
    """One row per contestant; the last column compares it with the fastest plain loop on as many cores."""
    table = []
    for contestant in contestants:
        entry = contestant.entry
        plain = [c for c in contestants if c.entry.parallel is None and c.entry.cores == entry.cores]
        fastest = min(median(c.seconds) for c in plain)
        ratio = fastest / median(contestant.seconds)
        table.append(
            [
                model,
                str(entry.cores),
                entry.name,
                contestant.settings[contestant.best] + (" tokens" if entry.parallel is not None else ""),
                spread([tokens / s for s in contestant.seconds], "{:.0f}"),
                f"{ratio:.2f}",
            ]
        )
    return table


def shown(row: Sequence[str]) -> list[str]:
    """What the page shows; the file has the rest."""
    return [row[0], row[2], *row[4:]]


def result(table: list[list[str]], repetitions: int, load: float) -> Result:
    ours = [row for row in table if row[2].startswith("SpecActor")]
    ratios = [float(row[-1]) for row in ours]
    missed = [f"{row[2]} ({row[0]}): {row[-1]}" for row in ours if float(row[-1]) < AIM]
    verdict = f"Missed by {', '.join(missed)}." if missed else "Met in every row."
    return Result(
        title="Training speed",
        verdict=(
            f"SpecActor trains at {min(ratios):.2f} to {max(ratios):.2f} of the fastest plain PyTorch loop on as many "
            f"cores. Aim: at least {AIM}. {verdict}"
        ),
        intro=(
            f"One training step (GRPO loss, backward, gradient clipping, AdamW) on {case.NUM_SEQUENCES} sequences of "
            "20-60 tokens in float32. The policy trainer packs sequences and runs Megatron-core; the plain loop runs "
            "transformers' model on padded batches sorted by length, with the same loss, which is checked. Every "
            "contestant first finds its fastest micro-batch (and, for PyTorch, implementation of the experts); then "
            f"they take turns, {repetitions} times after a warm-up. Tokens are those of prompts and responses; median "
            "(minimum-maximum). `of plain`: over the fastest plain loop on as many cores."
        ),
        columns=COLUMNS,
        rows=table,
        summary=(shown(COLUMNS), [shown(row) for row in table]),
        notes=f"Load of the machine at the start: {load:.1f} busy cores.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=list(case.MODELS), default=list(case.MODELS))
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that contestants are stopped
    load = psutil.cpu_percent(interval=2.0) / 100 * (psutil.cpu_count() or 1)
    table = []
    with tempfile.TemporaryDirectory(prefix="trainer-speed-") as temporary:
        for number, model in enumerate(arguments.models):
            folder = Path(temporary) / str(number)
            folder.mkdir()
            make_tiny_model(case.MODELS[model], 0, folder / "model")
            vocab_size = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
            tokens = sum(len(s.token_ids) for s in case.sequences(vocab_size))
            table += rows(model, contest(folder / "model", folder, arguments.repetitions), tokens)
    publish("trainer_speed", result(table, arguments.repetitions, load))


if __name__ == "__main__":
    main()
