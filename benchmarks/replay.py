"""Any sample again: steps of short runs are replayed on 1 and 2 ranks, with every kind of speculation, whole and in
responses alone; audits look for a verification that emits one wrong token in a thousand, or for nothing.

    python -m benchmarks.replay --folder DIR [--parts replay audit alarm] [--limit-s 300]

What is done stands in DIR, so a call that was ended, or has no time left for another case, is followed by another. The
page is written when all is done.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.disturbed_run import ROOT, Job, compared
from benchmarks.pictures import save_hunt
from benchmarks.results import RESULTS, Result, publish
from specactor.data.tokenizer import VOCAB_SIZE
from specactor.metrics import read_metrics
from specactor.replay import records
from specactor.replay.audit import gumbel
from specactor.replay.command import config_of, text_of
from specactor.replay.compare import first_difference
from specactor.run_folder import WARM_UPS, RunFolder
from specactor.trainer.microbatch import Shape, build, items_of
from specactor.trainer.objective import compare_with_noise
from specactor.types import TrainSequence

RUN = ("--train.steps", "6", "--checkpoint.keep", "6", "--parallel.expert", "1", "--tracking.wandb", "off")
"""Two data-parallel ranks: their checkpoints can also be loaded by one."""
STEPS = (2, 4, 6)
"""Replayed, each from the checkpoint before it."""
LEAST_S = 70.0  # of a call, to begin another case
LONGEST_S = 7200.0
DRAWN = 20  # samples of these steps that are also made alone
SPECULATION: dict[str, tuple[str, ...]] = {
    "off": ("--rollout.speculation.mode", "off"),
    "coupled": ("--rollout.speculation.mode", "coupled", "--rollout.speculation.drafters", "suffix"),
    "decoupled": (
        *("--rollout.speculation.mode", "decoupled", "--rollout.speculation.drafters", "decoupled", "suffix"),
        *("--rollout.speculation.window", "4", "--parallel.drafters", "1"),
    ),
}
AUDITED = (
    *("--train.steps", "20", "--rollout.prompts-per-step", "32", "--eval.problems", "0", "--tracking.wandb", "off"),
    *("--rollout.audit", "warn", "--rollout.speculation.mode", "coupled"),
    *("--checkpoint.every", "1", "--checkpoint.keep", "20", "--resume", "auto"),
)
WRONG = ("--rollout.speculation.drafters", "benchmarks.wrong_verification:one_in_a_thousand")
RIGHT = ("--rollout.speculation.drafters", "suffix")
AUDITS: dict[str, tuple[str, ...]] = {
    "wrong, seed 0": (*WRONG, "--seed", "0"),
    "wrong, seed 1": (*WRONG, "--seed", "1"),
    "wrong, seed 2": (*WRONG, "--seed", "2"),
    "right, seed 0": (*RIGHT, "--seed", "0"),
}
HUNTED = next(iter(AUDITS))  # what it finds is replayed
ALARM_STEPS = 1000
ALARM = (
    *("--train.steps", str(ALARM_STEPS), "--resume", "auto", "--checkpoint.every", "50", "--tracking.wandb", "off"),
    *("--model.path", "tiny:1", "--rollout.prompts-per-step", "2", "--rollout.group-size", "4"),
    *("--rollout.max-new-tokens", "24", "--eval.problems", "0", "--rollout.audit", "stop"),
    *("--rollout.speculation.mode", "coupled", *RIGHT, "--rollout.speculation.window", "4"),
)
"""The smallest model. Of every step all responses are begun again: a share of its time would pay for few tokens."""
COLUMNS = ("what", "ranks", "speculation", "step", "responses", "tokens", "result", "seconds")
Case = tuple[str, Callable[[Path, float], list[str]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--parts", nargs="*", default=list(PARTS))
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    options = parser.parse_args()
    base: Path = options.folder.resolve()
    base.mkdir(parents=True, exist_ok=True)
    cases = [case for part in options.parts for case in PARTS[part]()]
    file, began = base / "rows.json", time.monotonic()
    rows: dict[str, list[str]] = json.loads(file.read_text()) if file.exists() else {}
    for name, make in cases:
        if name in rows:
            continue
        left_s = options.limit_s - (time.monotonic() - began)
        if left_s < LEAST_S:
            print(f"{len(rows)} cases are done; call this again", flush=True)
            return
        try:
            rows[name] = make(base, left_s)
        except subprocess.TimeoutExpired:
            print(f"{name} goes on when this is called again", flush=True)
            return
        file.write_text(json.dumps(rows, indent=1))
        print(name, rows[name], flush=True)
    if all(name in rows for part in PARTS.values() for name, _ in part()):
        publish("replay", result(rows, base))


def replays() -> Iterator[Case]:
    yield "undisturbed", partial(recorded, name="run", struck=())
    yield from crossed(0)
    for mode, ranks, step in zip(SPECULATION, (1, 2, 2), STEPS, strict=True):
        yield (
            f"alone {ranks} {mode} {step}",
            partial(replayed, name="run", ranks=ranks, mode=mode, step=step, alone=True),
        )
    yield "the killed", partial(recorded, name="killed", struck=STEPS)
    for mode, step in zip(SPECULATION, STEPS, strict=True):
        yield f"killed {mode} {step}", partial(replayed, name="killed", ranks=2, mode=mode, step=step)
    for turn in (1, 2):
        yield from crossed(turn)


def crossed(turn: int) -> Iterator[Case]:
    """Whole steps: every number of ranks with every kind of speculation, each from another checkpoint in every turn."""
    for i, mode in enumerate(SPECULATION):
        for ranks in (1, 2):
            step = STEPS[(turn + i + ranks) % len(STEPS)]
            yield f"run {ranks} {mode} {step}", partial(replayed, name="run", ranks=ranks, mode=mode, step=step)


def recorded(base: Path, left_s: float, *, name: str, struck: Sequence[int]) -> list[str]:
    """Run the job; kill its engine in the rollouts of these steps."""
    began, job = time.monotonic(), Job(base, name, *RUN)
    for step in struck:
        job.wait_for("rollout", step)
        job.kill(job.victim("scheduler"))
    code = job.wait(min(left_s, LONGEST_S))
    if code:
        raise SystemExit(job.output())
    lines = compared(job.folder)
    deaths = job.output().count("had died and was started again")
    same = "equal metrics" if lines == compared(RunFolder(root=base / "runs" / "run")) else "other metrics"
    told = f"{deaths} engines killed, {same}" if struck else "recorded"
    return row(f"the run {name}", "2", "off", f"1-{len(lines) - 1}", job.folder.root, told, began)


def drawn(base: Path) -> dict[int, list[str]]:
    """Samples at random, by step."""
    every = [(step, s.group, s.sample) for step in STEPS for s in read(base / "runs" / "run", step).samples]
    chosen = random.Random(1).sample(every, DRAWN)
    return {step: [f"{g}.{k}" for s, g, k in chosen if s == step] for step in STEPS}


def replayed(
    base: Path, left_s: float, *, name: str, ranks: int, mode: str, step: int, alone: bool = False
) -> list[str]:
    """Replay a step, or samples of it alone."""
    began, run = time.monotonic(), base / "runs" / name
    further = SPECULATION[mode]
    if mode == "decoupled":
        further += ("--rollout.speculation.draft-model", str(draft_model(base)))
    command = [sys.executable, "-m", "specactor.cli", "replay", str(run), "--step", str(step), "--nproc", str(ranks)]
    names = drawn(base)[step] if alone else []
    command += ["--sample", *names] if alone else []
    code, said = called([*command, *further], left_s)
    if code not in (0, 1) or "guarantee: same bits" not in said:
        raise SystemExit(said)
    found = [line for line in said.splitlines() if line.startswith(("differ at", "cause: "))]
    target = run.with_name(f"{name}.replay-{step:06}")
    whole = "a step of the run with killed engines" if name == "killed" else "a step"
    what = f"{len(names)} samples alone" if alone else whole
    told = "equal" if code == 0 else "; ".join(found)
    return row(what, str(ranks), mode, str(step), target, told, began, only=step)


def called(command: Sequence[str], left_s: float) -> tuple[int, str]:
    """The exit code, and what was said; nothing goes on after the time is over."""
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=min(left_s, LONGEST_S))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # ranks end with their launcher
            raise
    return process.returncode, said


def row(
    what: str, ranks: str, mode: str, steps: str, run: Path, told: str, began: float, *, only: int = 0
) -> list[str]:
    of = [s for step in records.steps_of(run) if only in (0, step) for s in read(run, step).samples]
    tokens = sum(s.num_tokens for s in of)
    return [what, ranks, mode, steps, str(len(of)), f"{tokens:,}", told, f"{time.monotonic() - began:.0f}"]


def read(run: Path, step: int) -> records.StepRecord:
    return records.read(records.file_of(run, step))


def draft_model(base: Path) -> Path:
    """A draft model that is cut out of the policy."""
    out = base / "draft"
    if not out.exists():
        models = (base / "runs" / WARM_UPS).glob("model-*/config.json")
        # The run that looks for alarms has a smaller one.
        target = max(models, key=lambda file: json.loads(file.read_text())["num_hidden_layers"])
        command = [sys.executable, "-m", "specactor.cli", "drafter", "init"]
        subprocess.run([*command, "--target", str(target.parent), "--out", str(out)], cwd=ROOT, check=True)
    return out


def audits() -> Iterator[Case]:
    for name, options in AUDITS.items():
        yield name, partial(audited, name=name, options=(*AUDITED, *options))
        if name == HUNTED:
            yield "hunt", hunted


def audited(base: Path, left_s: float, *, name: str, options: Sequence[str]) -> list[str]:
    """Run the job with audits; count what they found, and their share of the time."""
    began, job = time.monotonic(), Job(base, file_of(name), *options)
    if job.wait(min(left_s, LONGEST_S)):
        raise SystemExit(job.output())
    sums = counted(job.folder.root)
    (base / f"{job.folder.root.name}.json").write_text(json.dumps(sums, indent=1))
    [told, *_] = [line.strip() for line in job.output().splitlines() if "audit: " in line] or ["no difference"]
    (base / f"{job.folder.root.name}.log").write_text(job.output())
    what = f"{sums['unpicked']} tokens that the noise does not pick, {sums['differences']:.0f} other responses"
    found = f"found in step {sums['first']}; in all {what}" if sums["first"] else told
    told = f"{found}; of {sums['scored']:,} tokens, {sums['audited']:,} of which were generated again in "
    told += f"{sums['audits']} steps, in {sums['share']:.2%} of the time"
    return row("a verification that is " + name.partition(",")[0], "2", "coupled", "1-20", job.folder.root, told, began)


def hunted(base: Path, left_s: float) -> list[str]:
    """Replay, without speculation, the step in which an audit found the fault; keep what was said and shown."""
    began, run = time.monotonic(), base / "runs" / file_of(HUNTED)
    step = json.loads((base / f"{run.name}.json").read_text())["first"]
    command = [sys.executable, "-m", "specactor.cli", "replay", str(run), "--step", str(step)]
    command += [*SPECULATION["off"], "--rollout.audit", "off"]
    code, said = called(command, left_s)
    if code != 1:
        raise SystemExit(said)
    target = run.with_name(f"{run.name}.replay-{step:06}")
    shared = sorted({*records.steps_of(run)} & {*records.steps_of(target)})
    ours, theirs = ([read(folder, at) for at in shared] for folder in (run, target))
    found = first_difference(ours, theirs, noise=gumbel)
    assert found is not None
    assert found.pair is not None
    assert found.token is not None
    text = text_of(config_of(run))
    log = (base / f"{run.name}.log").read_text().splitlines()
    hunt = {
        "audit": next(line for line in log if "audit: " in line).replace(f"{base}/", ""),
        "replay": [line.replace(f"{base}/", "") for line in said.splitlines()],
        "prompt": text(found.pair[0].prompt_ids.tolist()),
        "token": found.token,
        "texts": [[text([token]) for token in s.token_ids.tolist()] for s in found.pair],
        "scores": [
            [
                p + gumbel(s.seed, s.prompt_len + i, t)
                for i, (t, p) in enumerate(zip(s.token_ids, s.logprob_values, strict=True))
            ]
            for s in found.pair
        ],
    }
    (RESULTS / "replay_hunt.json").write_text(json.dumps(hunt, indent=1, default=float) + "\n")
    told = f"differ at step {found.step}: {found.cause}"
    return row("the fault that an audit found", "2", "off", f"{shared[0]}-{step}", target, told, began)


def file_of(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def counted(run: Path) -> dict[str, Any]:
    """What the audits of a run did, and what recording took, from its metrics."""
    lines = [line for line in read_metrics(run) if int(str(line["step"])) > 0]

    def total(name: str) -> float:
        return sum(float(str(line.get(name, 0.0))) for line in lines)

    phases = ("rollout", "reward", "audit", "train", "record", "refresh", "sync", "checkpoint")
    seconds = sum(total(f"time/{phase}_s") for phase in phases)
    found = ("audit/differences", "audit/unpicked")
    first = [int(str(line["step"])) for line in lines if any(float(str(line.get(name, 0))) for name in found)]
    compared_s = total("audit/scored") * comparison_s()
    return {
        "steps": len(lines),
        "seconds": seconds,
        "audits": sum("audit/responses" in line for line in lines),
        "responses": int(total("audit/responses")),
        "audited": int(total("audit/tokens")),
        "ties": total("audit/ties"),
        "differences": total("audit/differences"),
        "first": min(first, default=0),
        "scored": int(total("audit/scored")),
        "unpicked": int(total("audit/unpicked")),
        "share": (total("time/audit_s") + compared_s) / seconds,
        "compared_share": compared_s / seconds,
        "record_ms": 1e3 * total("time/record_s") / len(lines),
        "record_share": total("time/record_s") / seconds,
        "bytes_per_token": total("memory/record_bytes") / total("rollout/tokens"),
    }


@functools.cache
def comparison_s() -> float:
    """Seconds per token, on this machine, in which the trainer compares tokens of the quickstart with their noise."""
    rng, tokens = random.Random(0), 2048
    ids = tuple(rng.randrange(VOCAB_SIZE) for _ in range(tokens + 1))
    sequence = TrainSequence(token_ids=ids, prompt_len=1, seed=7, num_seeded=tokens)
    batch = build(items_of([sequence], [1.0], None, None), Shape(1, 0, 1), torch.device("cpu"))
    assert batch.seeds_R is not None
    logits_1TV, times = torch.randn(1, tokens + 1, VOCAB_SIZE), []
    for _ in range(10):
        began = time.perf_counter()
        compare_with_noise(batch, batch.seeds_R, logits_1TV, 1.0, None)
        times.append(time.perf_counter() - began)
    return statistics.median(times) / tokens


def alarms() -> Iterator[Case]:
    yield "alarm", alarmed


def alarmed(base: Path, left_s: float) -> list[str]:
    """Audit all responses of many steps; the run goes on where an earlier call was ended."""
    began, job = time.monotonic(), Job(base, "alarm", *ALARM, script="benchmarks/audit_everything.py")
    code = job.wait(min(left_s, LONGEST_S))
    if code:
        raise SystemExit(job.output())
    sums = counted(job.folder.root)
    (base / "alarm.json").write_text(json.dumps(sums, indent=1))
    told = f"{sums['differences']:.0f} differ, {sums['ties']:.0f} ties; {sums['responses']:,} responses audited"
    told += f" in {sums['audits']} steps"
    return row("audits of all that is right", "2", "coupled", f"1-{sums['steps']}", job.folder.root, told, began)


PARTS: dict[str, Callable[[], Iterator[Case]]] = {"replay": replays, "audit": audits, "alarm": alarms}


def result(rows: dict[str, list[str]], base: Path) -> Result:
    """The page."""
    repeated = [cells for name, cells in rows.items() if name.startswith(("run ", "killed ", "alone "))]
    alone = sum(int(cells[4]) for name, cells in rows.items() if name.startswith("alone"))
    wrong, right = (
        [json.loads((base / f"{file_of(name)}.json").read_text()) for name in AUDITS if name.startswith(kind)]
        for kind in ("wrong", "right")
    )
    alarm = json.loads((base / "alarm.json").read_text())
    seen = ", ".join(str(of["first"]) if of["first"] else "never" for of in wrong)
    verdict = (
        f"{sum(cells[6] == 'equal' for cells in repeated)} of {len(repeated)} replays are equal to the bit, on 1 and 2 "
        f"ranks, with any speculation and after killed engines; so are {alone} random samples made alone. One wrong "
        f"token in 1,000 was found in step {seen} of {len(wrong)} runs of 20 steps, by audits that took at most "
        f"{max(of['share'] for of in (*wrong, *right)):.1%} of the time. {alarm['steps']:,} right steps gave "
        f"{alarm['differences']:.0f} alarms."
    )
    intro = (
        "The quickstart with a short warm-up and 64 responses a step (audits: 256) on two trainer ranks and an engine. "
        "A replay starts at the checkpoint before its step and compares prompts, seeds, tokens, log-probabilities, "
        "scores, rewards and data state with the run's records; of whole steps on as many ranks also losses, weights "
        "and moments to the bit, on another number up to rounding. Wrong: a verification that takes a draft token for "
        "the target's sample once in 1,000 emitted tokens; its log-probability is right."
    )
    chances = ", ".join(f"{1 - 0.999 ** of['audited']:.0%}" for of in wrong)
    compared = max(of["compared_share"] for of in (*wrong, *right))
    notes = (
        f"Recording takes {right[0]['record_ms']:.1f} ms a step, {right[0]['record_share']:.2%} of its time, and "
        f"{right[0]['bytes_per_token']:.2f} bytes per token, with one response in 16 kept whole. The trainer "
        f"compares every token with its noise, in {compared:.2%} of the time or less. That engines generate some of "
        "them again, when .5 % of the time has paid for it, sees such a fault among n tokens with a chance of "
        f"1 - 0.999^n: {chances} in these runs. In the last run every response of every step was begun again, whatever "
        f"that took: {alarm['audited']:,} tokens; and all {alarm['scored']:,} were compared with their noise."
    )
    save_hunt()
    return Result(
        title="Any sample again",
        verdict=verdict,
        intro=intro,
        columns=COLUMNS,
        rows=list(rows.values()),
        notes=notes,
        picture="![A response and its replay, around the token that differs](replay_hunt.svg)",
    )


if __name__ == "__main__":
    main()
