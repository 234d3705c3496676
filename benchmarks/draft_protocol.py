"""What the draft protocol costs an engine per round: a drafter process that drafts at once, behind a real socket.

python -m benchmarks.draft_protocol
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import numpy as np

from benchmarks.results import Result, publish, spread
from specactor.rollout.decoupled.drafter_side import Continuer, Lane
from specactor.rollout.decoupled.main import serve
from specactor.rollout.decoupled.remote_drafter import Decoupled, connect
from specactor.rollout.decoupled.spec import State
from specactor.rollout.decoupled.transport import Address, Keys, local_endpoint, make_keys
from specactor.rollout.speculation.drafter import DraftSequence

ROOT = Path(__file__).resolve().parent.parent
REQUESTS = (1, 16, 64, 256)
WINDOW = 4
PROMPT_TOKENS = 200
ROUNDS = 60
FIRST_ROUNDS = 20  # not counted
VERIFY_S = 0.03  # between two rounds
AIMS_MS = {64: 0.3, 256: 1.0}  # of the median, by requests
RIGHT = 0.8  # share of requests whose round accepts all; the others' first draft token is wrong


class Null(Continuer):
    """Drafts the same token always, in no time."""

    version = 1

    def extend(self, lanes: Sequence[Lane]) -> list[list[int]]:
        return [[lane.prompt_ids[-1]] for lane in lanes]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of the rounds with one number of requests."""

    control_ms: list[float]  # per round: commits of all requests, and what proposing takes
    drafted: float  # tokens per request and round


def measure(requests: int, endpoint: str, *, curve: bool = False, rounds: int = ROUNDS) -> Cost:
    """With a drafter process of its own, at `endpoint`."""
    engine_keys, drafter_keys = make_keys() if curve else (None, None)
    process = _start(endpoint, drafter_keys)
    try:
        assert process.stdout is not None
        ready = msgspec.json.decode(process.stdout.readline(), type=State)
        drafter = connect([Address(endpoint=ready.endpoint, keys=engine_keys)], engine="engine", window=WINDOW)
        try:
            return _rounds(drafter, requests, rounds)
        finally:
            drafter.stop()
    finally:
        process.terminate()
        process.communicate()


def _start(endpoint: str, keys: Keys | None) -> subprocess.Popen[bytes]:
    text = msgspec.json.encode(keys).decode() if keys else ""
    command = [sys.executable, "-m", "benchmarks.draft_protocol", "--serve", endpoint, "--keys", text]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)


def _rounds(drafter: Decoupled, requests: int, rounds: int) -> Cost:
    sequences = [
        DraftSequence(request_id=f"request {i}", prompt_ids=tuple(range(1000, 1000 + PROMPT_TOKENS)))
        for i in range(requests)
    ]
    for sequence in sequences:
        drafter.open(sequence)
    while not drafter.tails.live:
        drafter.propose(sequences, [WINDOW] * requests)
        time.sleep(VERIFY_S)
    token, windows = sequences[0].prompt_ids[-1], [WINDOW] * requests
    emitted: list[list[int]] = [[token]] * requests
    control_ms, drafted = [], 0
    for number in range(FIRST_ROUNDS + rounds):
        for sequence, tokens in zip(sequences, emitted, strict=True):
            sequence.output_ids.extend(tokens)
        began = time.perf_counter()
        for sequence, tokens in zip(sequences, emitted, strict=True):
            drafter.commit(sequence, tokens)
        drafts = drafter.propose(sequences, windows)
        if number >= FIRST_ROUNDS:
            control_ms.append((time.perf_counter() - began) * 1e3)
            drafted += sum(map(len, drafts))
        emitted = [[*draft, token] if (number + i) % 10 < 10 * RIGHT else [token + 1] for i, draft in enumerate(drafts)]
        _work(VERIFY_S)
    return Cost(control_ms=control_ms, drafted=drafted / rounds / requests)


def _work(seconds: float) -> None:
    """In place of a forward pass: a core that computes, with caches full of other things."""
    until = time.perf_counter() + seconds
    matrix = np.ones((384, 384), dtype=np.float32)
    while time.perf_counter() < until:
        matrix @ matrix


def aims(rows: Mapping[int, Sequence[Cost]]) -> str:
    """Which are missed. `rows`: by requests, one cost per transport."""
    said = []
    for requests, aim_ms in AIMS_MS.items():
        medians = [median(cost.control_ms) for cost in rows[requests]]
        met = [ms for ms in medians if ms <= aim_ms]
        verdict = "met" if len(met) == len(medians) else "missed" if not met else f"met by {len(met)} of {len(medians)}"
        said.append(f"{aim_ms:g} ms at {requests} requests: {verdict} ({min(medians):.2f}-{max(medians):.2f})")
    return f"Median time per round to exchange messages with a drafter process, beside its aims: {'; '.join(said)}."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--serve", metavar="ENDPOINT", help=argparse.SUPPRESS)
    parser.add_argument("--keys", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        keys = msgspec.json.decode(options.keys, type=Keys) if options.keys else None
        tell = lambda ready: print(msgspec.json.encode(ready).decode(), flush=True)  # noqa: E731
        serve(Null(), endpoint=options.serve, keys=keys, on_ready=tell)
        return
    rows, found = [], {}
    for requests in REQUESTS:
        costs = found[requests] = [
            measure(requests, local_endpoint()),
            measure(requests, "tcp://127.0.0.1:*"),
            measure(requests, local_endpoint(), curve=True),
        ]
        rows.append([str(requests), *(spread(cost.control_ms, "{:.3f}") for cost in costs), f"{costs[0].drafted:.2f}"])
    publish(
        "draft_protocol",
        Result(
            title="Cost of the draft protocol",
            verdict=aims(found),
            intro=(
                f"Milliseconds that an engine spends per round on talking to a drafter process: commits of all "
                f"requests and one propose, median (minimum-maximum) of {ROUNDS} rounds. The drafter takes no time; "
                f"window {WINDOW}; a fifth of the requests are rolled back in every round. `drafted` is tokens per "
                "request and round."
            ),
            columns=("Requests", "ipc", "tcp", "ipc, CURVE", "drafted"),
            rows=rows,
        ),
    )


if __name__ == "__main__":
    main()
