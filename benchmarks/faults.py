"""Kill every kind of process in every phase: the run goes on, or resumes, with identical metrics and nothing left.

One run per victim: it is disturbed in every phase of the start, then in step 2 in one phase, in step 3 in the next, and
so on, and in the export. Where the kill ends the run, it is continued with ``--resume auto``. So the last steps of a
row's run have been through all faults.

    python -m benchmarks.faults [--victims scheduler "rank 1" ...] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.disturbed_run import Job, compared
from benchmarks.results import Result, Table, publish
from specactor.metrics import Value
from specactor.run_folder import WARM_UPS, RunFolder

PHASES = ("rollout", "reward", "train", "sync", "checkpoint")
STEPS = len(PHASES) + 2
START = (("data", 0), ("warm-up", 0), ("engines", 0), ("eval", 0))
STRIKES = (*START, *((phase, step) for step, phase in enumerate(PHASES, start=2)), ("export", STEPS))
"""(phase, RL step), in the order in which they come; step 0 is before the first."""
ENGINE_STRIKES = tuple(strike for strike in STRIKES if strike[0] not in ("data", "warm-up", "engines"))
"""While an engine can be used."""
ENGINES = ("scheduler", "engine server")
FATAL = ("rank 0", "rank 1", "launcher")
ATTEMPTS = 4  # A phase of milliseconds may be over before the signal arrives; then it is tried again
END_S = 30.0
LEFT_S = 15.0
MESSAGE = 160  # characters of a message that the table shows
OPTIONS = (
    *("--train.steps", str(STEPS), "--rollout.engine.max-restarts", "30", "--resume", "auto"),
    *("--checkpoint.export", "True"),
)
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
    """An engine killed once while it starts, and once per phase of the run that then goes on by itself."""
    name = f"without-{victim.replace(' ', '-')}"
    table = [_killed(base, name, victim, ("engines", 0))]
    job = Job(base, name, *OPTIONS)
    hits = [_strike(job, victim, phase, step) for phase, step in ENGINE_STRIKES]
    try:
        code: int | str = job.wait(240)
    except subprocess.TimeoutExpired:
        code = "hung"
    left = _list(job.left(LEFT_S))
    restarts = job.output().count("had died and was started again")
    said = f"engine 0 had died and was started again ({restarts} of {len(ENGINE_STRIKES)})"
    end = "completed" if code == 0 else f"ended with {code}"
    table = [row._replace(end=f"{row.end}; resumed, {end}") for row in table]
    table += [Row(hit, end, said, "-", left) for hit in hits]
    return _table(victim, table, compared(job.folder), reference, finish="")


def resume(base: Path, victim: str, reference: list[dict[str, object]]) -> list[list[str]]:
    """A run that is killed once per phase and continued each time."""
    name = f"without-{victim.replace(' ', '-')}"
    table = []
    for strike in STRIKES:
        for _ in range(ATTEMPTS):
            table.append(_killed(base, name, victim, strike))
            if table[-1].hit[0] == strike[0]:
                break
    last = Job(base, name, *OPTIONS)
    code = last.wait(240)
    left_at_end = last.left(LEFT_S)
    finish = "; resumed, completed" if code == 0 else f"; resumed, ended with {code}"
    if left_at_end:
        table.append(Row(("-", STEPS), "", "-", "-", _list(left_at_end)))
    return _table(victim, table, compared(last.folder), reference, finish=finish)


class Row(NamedTuple):
    """What one strike did."""

    hit: tuple[str, int]
    end: str
    said: str
    seconds: str
    left: str


def _killed(base: Path, name: str, victim: str, strike: tuple[str, int]) -> Row:
    """Start the run, or continue it, and strike; the run ends of it."""
    if strike[0] == "warm-up":  # else a warmed-up model of another run is taken
        shutil.rmtree(base / "runs" / WARM_UPS, ignore_errors=True)
    job = Job(base, name, *OPTIONS)
    hit = _strike(job, victim, *strike)
    killed = time.monotonic()
    try:
        end = f"ended with {job.wait(END_S)}"
    except subprocess.TimeoutExpired:
        end = f"hung for {END_S:g} s"
    spent = f"{time.monotonic() - killed:.1f} s"
    messages = [" ".join(m.partition(": ")[2].split()).replace(f"{base}/", "") for m in job.messages()]
    said = " / ".join(m[:MESSAGE] for m in messages) or "-"
    return Row(hit, end, said, spent, _list(job.left(LEFT_S)))


def _strike(job: Job, victim: str, phase: str, step: int) -> tuple[str, int]:
    """Kill the victim in the phase of that step or a later one; returns where it was hit."""
    if step > 0:
        job.wait_for("rollout", min(step, STEPS))
    else:
        job.wait_for(phase, step)
    pid = job.victim(victim)
    job.record()
    job.wait_for(phase, step)
    try:
        job.kill(pid)
    except ProcessLookupError:  # it was still dying of the strike before
        job.kill(job.victim(victim))
    after = job.folder.read_status()
    assert after is not None
    where = after.phase or f"after {phase}"
    before_next = where in (*(phase for phase, _ in START), "after sync", "export")
    return where, after.step + (not before_next)


def _table(
    victim: str,
    table: list[Row],
    lines: list[dict[str, Value]],
    reference: list[dict[str, object]],
    *,
    finish: str,
) -> list[list[str]]:
    return [
        [
            *(victim, row.hit[0], str(row.hit[1]), row.end + finish, row.said, row.seconds),
            *(_same(lines, reference, row.hit[1]), row.left),
        ]
        for row in table
    ]


def _same(lines: list[dict[str, Value]], reference: list[dict[str, object]], step: int) -> str:
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


def verdict(table: Sequence[Sequence[str]]) -> str:
    """What became of the runs."""
    same, clean = (sum(row[at] == good for row in table) for at, good in ((6, "identical"), (7, "nothing")))
    kept = sum(row[3] == "completed" for row in table)
    resumed = sum(row[3].endswith("resumed, completed") for row in table)
    phases = len({row[1] for row in table})
    return (
        f"{len(table)} times `kill -9`, in {phases} phases: the metrics of {same} steps are identical with those of an "
        f"undisturbed run, and {clean} left nothing behind. {kept} runs went on with a new engine, {resumed} ended and "
        f"were resumed, {len(table) - kept - resumed} ended with an error since an engine died while it started."
    )


def summary(table: Sequence[Sequence[str]]) -> Table:
    """By victim and end."""
    groups: dict[tuple[str, str], list[Sequence[str]]] = {}
    for row in table:
        groups.setdefault((row[0], row[3]), []).append(row)
    rows = []
    for (victim, end), of in groups.items():
        seconds = [float(row[5].split()[0]) for row in of if row[5] != "-"]
        took = f"{min(seconds)}-{max(seconds)} s" if seconds else "-"
        cells = [", ".join(dict.fromkeys(row[at] for row in of)) for at in (6, 7)]
        rows.append([victim, str(len(of)), end, took, *cells])
    return ("killed", "times", "the run", "over after", "step's metrics", "left behind"), rows


def _result(table: list[list[str]]) -> Result:
    return Result(
        title="Faults",
        verdict=verdict(table),
        intro=(
            f"The quickstart with {STEPS} steps of 64 responses on two trainer ranks and one engine, and a checkpoint "
            "after every step. SIGKILL to one process in one phase: one run per kind of process, struck once per phase "
            "of the start, of the steps and in the export. An engine in use is replaced; with a rank, the launcher or "
            "a starting engine the run ends, and the same command with `--resume auto` continues it. All metrics but "
            "times, rates and memory are compared. Left behind: processes, files in /dev/shm, temporary folders and "
            f"listening ports, {LEFT_S:g} s after the end."
        ),
        columns=COLUMNS,
        rows=table,
        summary=summary(table),
        notes="The file has the message of every run. A phase of milliseconds may be over before the signal arrives: "
        "such a row says where it landed.",
    )


if __name__ == "__main__":
    main()
