"""Kill every kind of process in every phase: the run goes on, or resumes, with identical metrics and nothing left.

One run per victim: it is disturbed in step 2 in one phase, in step 3 in the next, and so on. Where the kill ends the
run, it is continued with ``--resume auto``. So the last steps of a row's run have been through five faults.

    python -m benchmarks.faults [--victims scheduler "rank 1" ...] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.disturbed_run import Job, compared
from benchmarks.results import Result, publish
from specactor.run_folder import RunFolder

PHASES = ("rollout", "reward", "train", "sync", "checkpoint")
ENGINES = ("scheduler", "engine host")
FATAL = ("rank 0", "rank 1", "launcher")
STEPS = len(PHASES) + 2
ATTEMPTS = 4
"""A phase of milliseconds may be over before the signal arrives; then it is tried again."""
END_S = 30.0
LEFT_S = 15.0
OPTIONS = ("--train.steps", str(STEPS), "--rollout.engine.max-restarts", "30", "--resume", "auto")
COLUMNS = ("killed", "in phase", "of step", "the run", "its message", "over after", "step's metrics", "left behind")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--victims", nargs="*", default=[*ENGINES, *FATAL], choices=[*ENGINES, *FATAL])
    parser.add_argument("--folder", type=Path, help="keep runs and rows here; rows of earlier calls are shown too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        base: Path = options.folder or Path(scratch)
        base.mkdir(parents=True, exist_ok=True)
        reference = undisturbed(base)
        for victim in options.victims:
            rows = survive(base, victim, reference) if victim in ENGINES else resume(base, victim, reference)
            (base / f"rows-{victim}.json").write_text(json.dumps(rows))
        saved = [base / f"rows-{victim}.json" for victim in (*ENGINES, *FATAL)]
        table: list[list[str]] = [row for file in saved if file.exists() for row in json.loads(file.read_text())]
    if all(victim in {row[0] for row in table} for victim in (*ENGINES, *FATAL)):
        publish("faults", _result(table))
    else:  # a page under docs/ is written for the whole table alone
        print("\n".join(" | ".join(row) for row in table))
    if any("different" in row[6] or row[7] != "nothing" or "hung" in row[3] for row in table):
        raise SystemExit("a fault was not survived: see the table")


def undisturbed(base: Path) -> list[dict[str, object]]:
    """Metrics of the run that nobody disturbs."""
    folder = RunFolder(root=base / "runs" / "undisturbed")
    if not (folder.root / "summary.json").exists():  # else it is there from an earlier call
        job = Job(base, "undisturbed", *OPTIONS)
        if job.wait(300) != 0:
            raise SystemExit(job.output())
    return [dict(line) for line in compared(folder)]


def survive(base: Path, victim: str, reference: list[dict[str, object]]) -> list[list[str]]:
    """One run, its engine killed once per phase; it must complete by itself."""
    job = Job(base, f"without-{victim.replace(' ', '-')}", *OPTIONS)
    landed = {}
    for position, phase in enumerate(PHASES):
        landed[phase] = _strike(job, victim, phase, position + 2)
    try:
        code: int | str = job.wait(240)
    except subprocess.TimeoutExpired:
        code = "hung"
    left = job.left(LEFT_S)
    lines = compared(job.folder)
    restarts = job.output().count("had died and was started again")
    said = f"engine 0 had died and was started again ({restarts} of {len(PHASES)})"
    end = "completed" if code == 0 else f"ended with {code}"
    return [
        [victim, where, str(step), end, said, "-", _same(lines, reference, step), _list(left)]
        for where, step in landed.values()
    ]


def resume(base: Path, victim: str, reference: list[dict[str, object]]) -> list[list[str]]:
    """A run that is killed once per phase and continued each time."""
    name = f"without-{victim.replace(' ', '-')}"
    struck = []
    for position, phase in enumerate(PHASES):
        for _ in range(ATTEMPTS):
            job = Job(base, name, *OPTIONS)
            where, step = _strike(job, victim, phase, position + 2)
            killed = time.monotonic()
            try:
                end = f"ended with {job.wait(END_S)}"
            except subprocess.TimeoutExpired:
                end = f"hung for {END_S:g} s"
            spent = f"{time.monotonic() - killed:.1f} s"
            messages = [m.partition(": ")[2] for m in job.messages()]
            left = job.left(LEFT_S)
            struck.append((where, step, end, " / ".join(messages) or "-", spent, left))
            if where == phase:
                break
    last = Job(base, name, *OPTIONS)
    code = last.wait(240)
    left_at_end = last.left(LEFT_S)
    lines = compared(last.folder)
    finish = "resumed, completed" if code == 0 else f"resumed, ended with {code}"
    return [
        [victim, where, str(step), f"{end}; {finish}", said, spent, _same(lines, reference, step), _list(left)]
        for where, step, end, said, spent, left in struck
    ] + ([[victim, "-", "-", finish, "-", "-", "-", _list(left_at_end)]] if left_at_end else [])


def _strike(job: Job, victim: str, phase: str, step: int) -> tuple[str, int]:
    """Kill the victim in the phase of that step or a later one; returns where it was hit."""
    job.wait_for("rollout", step)
    pid = job.victim(victim)
    job.record()
    job.wait_for(phase, step)
    job.kill(pid)
    after = job.folder.read_status()
    assert after is not None
    where = after.phase or f"after {phase}"
    return where, after.step + (where not in ("checkpoint", "after checkpoint"))


def _same(lines: list[dict[str, float | int | str]], reference: list[dict[str, object]], step: int) -> str:
    """Whether the line of `step` and all lines are those of the undisturbed run."""
    if len(lines) != len(reference):
        return f"different: {len(lines)} lines, expected {len(reference)}"
    differ = [k for got, want in zip(lines, reference, strict=True) for k in want if got.get(k) != want[k]]
    own = [k for k in reference[step] if lines[step].get(k) != reference[step][k]]
    if own:
        return f"different: {', '.join(own)[:60]}"
    return "identical" if not differ else f"different in other steps: {', '.join(sorted(set(differ)))[:60]}"


def _list(left: list[str]) -> str:
    return "; ".join(left) or "nothing"


def _result(table: list[list[str]]) -> Result:
    return Result(
        title="Faults",
        intro=(
            "The quickstart, cut short to "
            f"{STEPS} steps of 64 responses on two trainer ranks and one engine, a checkpoint after every step. "
            "SIGKILL to one process in one phase; one run per kind of process, struck once per phase, in steps 2, 3, "
            "... An engine is replaced and the run goes on; for a rank or the launcher the run ends, and the same "
            "command with `--resume auto` continues it. All metrics but times, rates and memory are compared with an "
            f"undisturbed run. Left behind: processes, files in /dev/shm, temporary folders of engines and listening "
            f"ports, {LEFT_S:g} s after the end."
        ),
        columns=COLUMNS,
        rows=table,
        notes="A phase of milliseconds may be over before the signal arrives: such a row says where it landed.",
    )


if __name__ == "__main__":
    main()
