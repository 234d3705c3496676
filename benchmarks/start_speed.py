"""Seconds of a small job from torchrun to its first step, and from an engine's death to its replacement.

    python -m benchmarks.start_speed [--old FOLDER] [--repetitions N]

With the checkout of an earlier commit both take turns. A turn is one job: three steps on two ranks, a model of two
layers, no warm-up. In the rollout of its second step the engine's scheduler is killed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from benchmarks.disturbed_run import ROOT
from benchmarks.results import likely, markdown, spread
from benchmarks.speculation_speed_table import FEWEST
from specactor.rollout import warm_starter
from specactor.run_folder import RunFolder

LIMIT_S = 300.0  # longest wait for anything
POLL_S = 0.005
BOTH = (
    *("--train.steps", "3", "--warmup.solver=", "--eval.problems", "0", "--checkpoint.export", "False"),
    *("--rollout.prompts-per-step", "8"),
)
PRESENT = ("quickstart_plain", "--model.path", "tiny:2", "--data.params", "min_n=1", "max_n=9999", "size=1000", *BOTH)
EARLIER = (
    *("quickstart", "--model.tiny.num-layers", "2", "--data.train.size", "1000", "--data.eval.size", "100"),
    *BOTH,
)
REPLACED = "had died and was started again"  # printed when the new engine takes requests
MEASURES = ("first step begins", "first step is over", "engine is replaced")


def one(checkout: Path, settings: Sequence[str], base: Path) -> tuple[float, ...]:
    """Seconds of `MEASURES`, of one job. Raises SystemExit when it does not get through."""
    folder, log = RunFolder(root=base / "runs" / "job"), base / "log"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "launch/train_moe.py")
    hidden = (warm_starter.NAME, "PYTHONDONTWRITEBYTECODE")  # a job starts its own, and compiles no source again
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "PYTHONPATH": str(checkout)}
    command = [sys.executable, *torchrun, *settings, "--name", "job", "--output-dir", str(base / "runs")]

    def reached(step: int, phase: str = "") -> bool:
        status = folder.read_status()
        return status is not None and status.step >= step and phase in ("", status.phase)

    with log.open("w") as file:
        started = time.monotonic()
        job = subprocess.Popen(
            command, cwd=checkout, env=environment | {"PYTHONUNBUFFERED": "1"}, stdout=file, stderr=file
        )
        try:
            wait(lambda: reached(0, "rollout"), job)
            begun = time.monotonic()
            wait(lambda: reached(1), job)
            over = time.monotonic()
            wait(lambda: reached(1, "rollout"), job)
            status = folder.read_status()
            assert status is not None
            victims = [
                process
                for process in psutil.Process(status.rank_pids[0]).children(recursive=True)
                if "scheduler" in " ".join(process.cmdline())
            ]
            for victim in victims:
                victim.kill()
            died = time.monotonic()
            wait(lambda: REPLACED in log.read_text(errors="replace"), job)
            replaced = time.monotonic()
            if len(victims) != 1 or job.wait(LIMIT_S) != 0 or not reached(3):
                raise RuntimeError(f"{len(victims)} schedulers were killed, and the job ended with {job.poll()}")
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            raise SystemExit(f"start_speed: {checkout}: {error}\n{log.read_text(errors='replace')[-4000:]}") from None
        finally:
            if job.poll() is None:
                job.terminate()  # torchrun ends its ranks, and they their engines
                job.wait(60)
    return begun - started, over - started, replaced - died


def wait(condition: Callable[[], bool], job: subprocess.Popen[bytes]) -> None:
    """Until it holds. Raises RuntimeError when the job ends before, or the time is over."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if job.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the job has ended with {job.poll()}, or {LIMIT_S:g} s are over")
        time.sleep(POLL_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--old", type=Path, metavar="FOLDER", help="a checkout of an earlier commit")
    parser.add_argument("--repetitions", type=int, default=FEWEST)
    options = parser.parse_args()
    contestants = {"present": (ROOT, PRESENT)}
    if options.old:
        contestants["earlier"] = (options.old.resolve(), EARLIER)
    seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in contestants}
    for turn in range(-1, options.repetitions):  # the first fills the caches of files, and is not counted
        for name in list(contestants)[:: 1 if turn % 2 else -1]:
            with tempfile.TemporaryDirectory(prefix="start-speed-") as temporary:
                found = one(*contestants[name], Path(temporary))
            print(f"turn {turn + 1}, {name}:", *(f"{value:.2f} s" for value in found), flush=True)
            if turn >= 0:
                seconds[name].append(found)
    shown = likely if options.repetitions >= FEWEST else spread
    rows = []
    for at, measure in enumerate(MEASURES):
        of = {name: [found[at] for found in seconds[name]] for name in contestants}
        ratios = [[new / old for new, old in zip(of["present"], of["earlier"], strict=True)]] if options.old else []
        rows.append([measure, *(shown(values, "{:.2f}") for values in (*of.values(), *ratios))])
    columns = ("s until", *contestants, *(["present / earlier"] if options.old else []))
    print(markdown(columns, rows))


if __name__ == "__main__":
    main()
