"""``specactor replay`` runs steps of a run again and compares; ``specactor diff`` compares two runs."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from specactor.config import Config
from specactor.errors import ConfigError, DataError
from specactor.metrics import read_metrics
from specactor.recipes import EXAMPLES, from_json
from specactor.replay import records
from specactor.replay.compare import Finding, first_difference
from specactor.replay.noise import noise_of
from specactor.replay.records import StepRecord
from specactor.run_folder import Replay, RunFolder

TRAIN = EXAMPLES.parent / "launch" / "train_moe.py"
DIFFERENT = 1  # exit code where two runs differ


def replay(argv: list[str], console: Console) -> int:
    """Run steps of a run again, from the nearest checkpoint, and compare them with what it recorded.

    --step N            the last step to run again
    --group G           of step N this group alone; it is not learned from
    --sample K          of that group this response alone
    --nproc N           ranks; by default as many as the run had
    --key.path value    other settings, for example --rollout.speculation.mode off

    Steps between the checkpoint and N are trained again. Exit code 0: all is equal; 1: something differs, and what.
    """
    parser = argparse.ArgumentParser(prog="specactor replay", add_help=False, allow_abbrev=False)
    parser.add_argument("run", type=Path)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--group", type=int)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--nproc", type=int)
    options, overrides = parser.parse_known_args(argv)
    source = options.run.resolve()
    recorded, config = records.read(records.file_of(source, options.step)), config_of(source)
    what = Replay(step=options.step, group=options.group, sample=options.sample)
    check(what, config, recorded)
    start = _checkpoint_before(source, options.step)
    target = RunFolder(root=source.with_name(f"{source.name}.replay-{options.step:06}"))
    if target.root.exists() and not target.replay.exists():
        raise ConfigError.at("replay", target.root, "no folder, or that of a replay", "Move it away.")
    shutil.rmtree(target.root, ignore_errors=True)
    target.root.mkdir()
    target.replay.write_text(json.dumps(asdict(what)))
    first = 1 if start is None else _step_of(start) + 1
    console.print(_plan(source, what, first), soft_wrap=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(options.nproc or _ranks(source)), str(TRAIN), str(source / "config.json")),
        *("--name", target.root.name, "--output-dir", str(source.parent), "--resume", str(start or "off")),
        *("--checkpoint.every", "0", "--tracking.wandb", "off", "--tracking.record", "full", *overrides),
    ]
    code = subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}, check=False).returncode
    if code:
        raise DataError(f"replay: torchrun ended with {code}, expected 0. What it said stands above.")
    return _say(source, target.root, console, guarantee=_guarantee(config))


def diff(argv: list[str], console: Console) -> int:
    """Compare two runs, or a run and its replay: the first step, sample, token or tensor that differs, and why.

    Exit code 0: all that both recorded is equal; 1: something differs.
    """
    parser = argparse.ArgumentParser(prog="specactor diff", add_help=False, allow_abbrev=False)
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    options = parser.parse_args(argv)
    return _say(options.a, options.b, console)


def check(what: Replay, config: Config, recorded: StepRecord) -> None:
    """Raise ConfigError for what cannot be run again."""
    if config.rollout.oversample > 1:
        raise ConfigError.at(
            "rollout.oversample", config.rollout.oversample, "1", "Which groups are complete first is up to chance."
        )
    if not recorded.samples:
        raise ConfigError.at("--step", what.step, "a step that sampled", "Step 0 has weights alone.")
    if what.group is None:
        if what.sample is not None:
            raise ConfigError.at("--sample", what.sample, "it together with --group", "Name its group, too.")
        return
    if config.algorithm.dynamic_sampling:
        raise ConfigError.at("--group", what.group, "none with algorithm.dynamic_sampling", "Replay the whole step.")
    known = [s.sample for s in recorded.samples if s.group == what.group]
    if not known or (what.sample is not None and what.sample not in known):
        groups = max(s.group for s in recorded.samples)
        raise ConfigError.at(
            "--group and --sample",
            f"{what.group}, {what.sample}",
            f"a group of 0..{groups} and a sample of 0..{max(known, default=config.rollout.group_size - 1)}",
            "The step recorded no other.",
        )


def config_of(run: Path) -> Config:
    """Return a run's config. Raises DataError where there is none."""
    try:
        return from_json(json.loads((run / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise DataError(f"{run}: got no config.json that can be read ({error}). Give the folder of a run.") from error


def _checkpoint_before(run: Path, step: int) -> Path | None:
    """The newest checkpoint from which the step can be reached; None for the beginning of the run."""
    found = [path for path in (run / "checkpoints").glob("step-[0-9]*") if path.suffix != ".tmp"]
    return max((path for path in found if _step_of(path) < step), key=_step_of, default=None)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _ranks(run: Path) -> int:
    """Return how many ranks the run had."""
    return max((len(records.read(records.file_of(run, step)).weights) for step in records.steps_of(run)[:2]), default=1)


def _plan(run: Path, what: Replay, first: int) -> str:
    seconds = [
        sum(float(value) for name, value in line.items() if name.startswith("time/") and value is not None)
        for line in read_metrics(run)
        if first <= int(str(line["step"])) <= what.step
    ]
    steps = f"steps {first} to {what.step}" if first < what.step else f"step {first}"
    start = "the start, with its warm-up" if first == 1 else f"the checkpoint of step {first - 1}"
    alone = "" if what.group is None else f", of step {what.step} group {what.group}"
    alone += "" if what.sample is None else f", sample {what.sample}"
    return f"{steps} from {start}{alone}; {sum(seconds):.0f} s in the run, and the start of the engines"


def _guarantee(config: Config) -> str:
    if config.model.dtype == "float32" and not torch.cuda.is_available():
        return "same bits (float32 on CPUs), on any number of engines, with or without speculation"
    return "same law; where two tokens score within rounding of each other, the other one may be emitted"


def _say(a: Path, b: Path, console: Console, *, guarantee: str = "") -> int:
    """Print what two runs have in common, and where they differ first."""
    shared = sorted({*records.steps_of(a)} & {*records.steps_of(b)})
    if not shared:
        raise DataError(
            f"{a}, {b}: got records of no common step, expected at least one. "
            "Runs keep them with tracking.record sampled or full."
        )
    ours, theirs = (_read(run, shared) for run in (a, b))
    found = first_difference(ours, theirs, noise=noise_of(config_of(a).rollout))
    if guarantee:
        console.print(f"guarantee: {guarantee}", soft_wrap=True)
    if found is None:
        places = [{(s.group, s.sample) for s in record.samples} for record in theirs]
        console.print(
            f"equal: steps {shared[0]} to {shared[-1]}, {sum(map(len, places))} responses: prompts, seeds, tokens, "
            "log-probabilities, scores, rewards, and where they were learned from, advantages, losses and weights",
            soft_wrap=True,
        )
        return 0
    _print(found, console)
    return DIFFERENT


def _read(run: Path, steps: Sequence[int]) -> list[StepRecord]:
    return [records.read(records.file_of(run, step)) for step in steps]


def _print(found: Finding, console: Console) -> None:
    evidence = (f"  {text}" for text in found.evidence)
    for text in (f"differ at step {found.step}: {found.where}", f"cause: {found.cause}", *evidence):
        console.print(escape(text), soft_wrap=True)
