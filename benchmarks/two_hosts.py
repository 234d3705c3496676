"""The quickstart on two hosts, over links of several rates and delays, beside one host: seconds and bytes per phase.

    python -m benchmarks.two_hosts          (Linux, as root: see benchmarks/virtual_hosts.py)

The hosts are namespaces of this machine. Bytes on the link are counted in any case; seconds are those of a machine that
computes for both hosts and carries the link.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.disturbed_run import ROOT, compared
from benchmarks.results import Result, publish
from benchmarks.virtual_hosts import VirtualHosts, environment, why_not
from specactor.metrics import Value, read_metrics
from specactor.run_folder import WARM_UPS, RunFolder

PHASES = ("rollout", "train", "checkpoint", "sync")
ONE = "one host"
RUN_S = 240.0
_POLL_S = 0.002
MODEL = ("--warmup.steps", "40", "10", "--eval.problems", "0", "--checkpoint.export", "False")
JOB = (*MODEL, "--tracking.wandb", "off", "--parallel.engines", "2", "--checkpoint.every", "1")


@dataclass(frozen=True, kw_only=True)
class Link:
    mbit_per_s: float
    delay_ms: float

    def __str__(self) -> str:
        return f"{self.mbit_per_s:,g} Mbit/s, {self.delay_ms:g} ms"


LINKS = tuple(Link(mbit_per_s=rate, delay_ms=delay) for rate in (1000, 100) for delay in (0.1, 10))


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run."""

    seconds: Mapping[str, float]
    """Per phase, the median of its steps but the first."""
    link_bytes: Mapping[str, float]
    """Per phase, what both hosts sent, a mean over steps."""
    lines: Sequence[Mapping[str, Value]]
    """Of its metrics, what must not differ."""


def run(base: Path, name: str, link: Link | None, steps: int) -> Run:
    """Run the job on one host with two ranks (no link), or on two with one each."""
    options = [
        "quickstart_plain",
        "--name",
        name,
        "--output-dir",
        str(base / "runs"),
        *JOB,
        "--train.steps",
        str(steps),
    ]
    folder, number = RunFolder(root=base / "runs" / name), 2 if link else 1
    delay_s, bits_per_s = (link.delay_ms / 1e3, link.mbit_per_s * 1e6) if link else (0.0, 0.0)
    with VirtualHosts(number, delay_s=delay_s, bits_per_s=bits_per_s) as hosts, (base / f"{name}.log").open("w") as log:
        settings = environment(NODES=str(number), HEAD="n0:29500", GPUS=str(2 // number))
        command = [str(ROOT / "launch" / "multi_node.sh"), *options]
        started = [host.start(command, log=log, env=settings) for host in hosts.hosts]
        sent = watched(folder, hosts, started)
    if any(process.returncode for process in started):
        raise RuntimeError((base / f"{name}.log").read_text()[-4000:])
    lines = [line for line in read_metrics(folder.root) if int(str(line["step"])) > 0]
    return Run(
        seconds={phase: median(float(str(line[f"time/{phase}_s"])) for line in lines[1:]) for phase in PHASES},
        link_bytes={phase: sent[phase] / steps for phase in PHASES},
        lines=compared(folder),
    )


def watched(folder: RunFolder, hosts: VirtualHosts, started: Sequence[subprocess.Popen[bytes]]) -> Mapping[str, float]:
    """Wait for the end; return the bytes that hosts sent while rank 0 was in each phase of an RL step."""
    sent: dict[str, float] = defaultdict(float)
    deadline, before, phase = time.monotonic() + RUN_S, 0, ""
    while any(process.poll() is None for process in started):
        if time.monotonic() > deadline:
            raise RuntimeError(f"it takes more than {RUN_S:g} s: {folder.root}")
        time.sleep(_POLL_S)
        status, now = folder.read_status(), sum(hosts.sent_bytes)
        sent[phase] += now - before
        phase, before = (status.phase if status is not None else ""), now
    return sent


def table(runs: Mapping[str, Run], *, steps: int, model_bytes: int) -> Result:
    """Return the page. Args: runs: by link, and of one host; model_bytes: of the policy's weights."""
    alone = runs[ONE]
    rows = [
        [
            name,
            *(f"{run.seconds[phase]:.2f}" for phase in PHASES),
            *("-" if name == ONE else f"{run.link_bytes[phase] / 1e6:,.2f}" for phase in PHASES),
        ]
        for name, run in runs.items()
    ]
    others = {name: run for name, run in runs.items() if name != ONE}
    wrong = [name for name, run in others.items() if run.lines != alone.lines]
    same = f"DIFFERENT metrics: {'; '.join(wrong)}" if wrong else "all metrics are those of one host, to the bit"
    whole = {name: sum(run.seconds.values()) / sum(alone.seconds.values()) for name, run in runs.items()}
    slow = max(others, key=lambda name: whole[name])
    fast = min(others, key=lambda name: whole[name])
    synced = median(run.link_bytes["sync"] for run in others.values())
    trained = median(run.link_bytes["train"] for run in others.values())
    bits = 8 * (synced + trained)
    return Result(
        title="Two hosts beside one",
        verdict=f"A step takes {whole[fast]:.2f} times as long as on one host over {fast}, and {whole[slow]:.2f} times "
        f"over {slow}; {same}. A weight sync sends {synced / model_bytes:.2f} times the model's "
        f"{model_bytes / 1e6:.1f} MB over the link, {synced / model_bytes / 2:.2f} times to each host.",
        intro=f"{steps} steps of the quickstart (a warm-up of 50 steps, two engines) on two hosts with one rank each, "
        "which are namespaces of one machine, joined by a link of that rate and one-way delay; beside it one host with "
        "two ranks. Seconds are medians of all steps but the first; bytes on the link are those of both hosts per "
        "step, headers included.",
        columns=("link", *(f"{phase}, s" for phase in PHASES), *(f"{phase}, MB" for phase in PHASES)),
        rows=rows,
        notes=f"What training and sync send takes {bits / 10e9 * 1e3:,.2f} ms at 10 Gbit/s, and "
        f"{bits / 400e9 * 1e3:,.3f} ms at 400 Gbit/s, per step of this model; it grows with the model's bytes. What a "
        "rollout sends grows with its tokens.",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(f"benchmarks.two_hosts: {reason}")
    runs = {}
    with tempfile.TemporaryDirectory(prefix="two-hosts-") as temporary:
        base = Path(temporary)
        runs[ONE] = run(base, "one", None, options.steps)
        for place, link in enumerate(LINKS):
            runs[str(link)] = run(base, f"two-{place}", link, options.steps)
        [weights] = (base / "runs" / WARM_UPS).glob("warmup-*/model.safetensors")
        model_bytes = weights.stat().st_size
    publish("two_hosts", table(runs, steps=options.steps, model_bytes=model_bytes))


if __name__ == "__main__":
    main()
