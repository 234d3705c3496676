"""Runs benchmarks one after the other, each in processes of its own; results go to docs/results/.

python -m benchmarks.run [NAME ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

BENCHMARKS = {
    "weights_sync": "seconds and GB/s of bringing new weights from the trainer to the engines",
    "samples": "memory and bytes of a step's samples on 2, 8 and 64 ranks, by owner and everywhere",
    "text_drafters": "cost and accept_length of drafters that look things up in text",
    "equality": "speculation on and off, token for token",
    "acceptance": "how often a draft model is right, and how often it could be",
    "trainer_speed": "training tokens per second, beside a plain PyTorch loop on the same cores",
    "paper_plans": "plans at the paper's scale, predicted from published device figures",
    "paper_rollouts": "rollouts and RL steps in the paper's settings, simulated",
    "simulator_scale": "what planning and simulating cost, from 8 to 4,096 GPUs",
    "draft_protocol": "milliseconds per round that talking to a drafter process costs an engine",
    "dead_drafter": "tokens per second with a drafter that was stopped or killed, over plain decoding",
    "decoupled_speed": "coupled and decoupled drafting on the same cores, and what the planner foresaw",
    "paced": "coupled and decoupled drafting at the pace of GPUs, on equal numbers of them",
    "paced_clock": "where decoupled drafting wins on equal devices, played on a clock by the shipped ends",
    "paced_unequal": "decoupled drafting on unequal devices and slow links, on a clock, and the plan by costs",
    "tail_speed": "the last requests of a rollout: single drafters, the best in hindsight, and Fastest-of-N",
    "tasks": "which draft method is best for which task, and whether that is known before a response",
    "drafter_refresh": "accept_length of a draft model that stays fresh, beside a frozen one",
    "heads": "an EAGLE-3 head beside a draft model of one layer: acceptance, and the cost of a drafted token",
    "head_training": "accept_length of a head that learns with the policy, beside a frozen one, and another loss",
    "quickstart_speed": "rollouts of the quickstart with a draft model of the warm-up, beside plain ones",
    "two_hosts": "seconds and bytes per phase of an RL step on two hosts, over several links (needs root)",
    "speculation_speed": "tokens per second of plain SGLang, its own speculation, and ours",
    "overlap": "plain rounds launched ahead, at the pace of a GPU",
    "keys_once": "attention of a verification with keys gathered for each row, or once per request",
    "speculation_speed_profile": "where the time of a round goes, of the contestants of speculation_speed",
}
"""Module in this package -> what it measures."""


def run(names: Sequence[str]) -> list[str]:
    """Run each, also after one has failed; returns the names of those that failed."""
    failed = []
    for name in names:
        print(f"== {name}: {BENCHMARKS[name]}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], cwd=ROOT, check=False).returncode != 0:
            failed.append(name)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 when all benchmarks went through."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description="Runs the named benchmarks, or all. Results go to docs/results/NAME.md.",
        epilog="\n".join(["benchmarks:", *(f"  {name:28}{text}" for name, text in BENCHMARKS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="one of those below")
    names = parser.parse_args(arguments).names or list(BENCHMARKS)
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"NAME: got {', '.join(unknown)}, expected one of {', '.join(BENCHMARKS)}")
    failed = run(names)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
