"""What planning and simulating cost from 8 to 4,096 GPUs, and the planner's own time per decision.

Processor seconds of this process, so other work on the machine counts only where it takes its caches.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from benchmarks.results import Result, publish
from specactor.planning.model_shapes import SHAPES
from specactor.planning.plans import Candidates, Cluster
from specactor.planning.rooflines import device, from_figures
from specactor.planning.search import search
from specactor.rollout.speculation.acceptance import AcceptanceModel
from specactor.rollout.speculation.costs import OnlineCosts
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.planner import Owners, of_drafter
from specactor.simulator.engine import Policy, SimulatedMode
from specactor.simulator.requests import Lengths, Method, World, draw
from specactor.simulator.rollout import simulate

SIZES = ((8, 64), (64, 64), (256, 64), (1024, 16), (4096, 4))  # GPUs, and requests per GPU
GROUP = 16
MAX_WINDOW = 8
LENGTHS = Lengths(median=20000, sigma=1.0, longest=40000)  # A mean of about 20,000 tokens
METHODS = {"Qwen2.5-0.5B": Method(rate=0.7, drift=0.01), "Qwen2.5-1.5B": Method(rate=0.76, drift=0.01)}
COLUMNS = ("GPUs", "requests", "tokens", "search", "off", "auto", "events", "decisions", "virtual s, auto")
BATCH = 256


def candidates() -> Candidates:
    return from_figures(
        SHAPES["Qwen2.5-32B"],
        [SHAPES[name] for name in METHODS],
        device("H100"),
        survivals={name: method.survival(MAX_WINDOW + 1) for name, method in METHODS.items()},
        context=8192,
        max_requests=2048,
        sizes=(4,),
        drafter_sizes=(1, 2),
    )


def row(devices: int, per_device: int) -> list[str]:
    found = candidates()
    requests = draw(LENGTHS, prompts=devices * per_device // GROUP, group_size=GROUP, seed=(0, 0))
    cluster = Cluster(devices=devices, requests=len(requests))
    world = World(methods=METHODS, jitter=0.02)
    cells, events, decisions, virtual = [], 0, 0, 0.0
    modes: tuple[SimulatedMode, ...] = ("off", "auto")
    for mode in modes:
        started = time.process_time()
        outcome = simulate(cluster, found, world, Policy(mode=mode, max_window=MAX_WINDOW), requests)
        cells.append(f"{time.process_time() - started:.1f} s")
        events, decisions, virtual = outcome.events, outcome.decisions, outcome.seconds
    started = time.process_time()
    search(cluster, found.verifiers, found.drafters, max_window=MAX_WINDOW)
    searched = time.process_time() - started
    return [
        f"{devices:,}",
        f"{len(requests):,}",
        f"{requests.lengths.sum() / 1e6:,.0f} M",
        f"{searched:.2f} s",
        *cells,
        f"{events:,}",
        f"{decisions:,}",
        f"{virtual:,.0f}",
    ]


def decision_ms() -> dict[str, float]:
    """Processor milliseconds of one decision on 256 requests, of two drafters, the median of 20."""
    found, rng = candidates(), np.random.default_rng(0)
    option, names = found.verifiers[0], [drafter.name for drafter in found.drafters]
    model, costs = AcceptanceModel(max_window=MAX_WINDOW), OnlineCosts(option.costs)
    sequences = [DraftSequence(request_id=str(i), prompt_ids=()) for i in range(BATCH)]
    for sequence in sequences:
        for right in rng.integers(0, MAX_WINDOW + 1, 4).tolist():
            model.observe(sequence.request_id, MAX_WINDOW, right, asked=MAX_WINDOW)
    ids = [sequence.request_id for sequence in sequences]
    verify_W = costs.verify_curve(BATCH, BATCH * (1 + MAX_WINDOW))[::BATCH][1:]
    calls: dict[str, Callable[[], object]] = {
        "windows (best_windows)": lambda: of_drafter(names[0], model, costs, sequences, [MAX_WINDOW] * BATCH, None),
        "drafters (Owners.of)": lambda: Owners().of(
            ids, {name: model.survivals(ids, covered=False) for name in names}, dict.fromkeys(names, verify_W)
        ),
    }
    return {name: _ms(call) for name, call in calls.items()}


def _ms(call: Callable[[], object]) -> float:
    call()
    spent = []
    for _ in range(20):
        started = time.process_time()
        call()
        spent.append(1e3 * (time.process_time() - started))
    return median(spent)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--most", type=int, default=SIZES[-1][0], help="GPUs of the largest cluster")
    options = parser.parse_args(arguments)
    rows = [row(devices, each) for devices, each in SIZES if devices <= options.most]
    decisions = "; ".join(f"{name} {ms:.2f} ms" for name, ms in decision_ms().items())
    publish(
        "simulator_scale",
        Result(
            title="What planning and simulating a cluster costs",
            verdict=(
                f"Planning for {rows[-1][0]} GPUs takes {rows[-1][3]} of processor time, simulating a rollout of "
                f"{rows[-1][1]} requests on them {rows[-1][4]} without speculation and {rows[-1][5]} with `auto`. A "
                f"decision on {BATCH} requests takes {decisions} (aim: at most 1 ms)."
            ),
            intro=(
                f"Qwen2.5-32B on engines of 4 H100 by published figures, two draft models, requests in "
                f"groups of {GROUP}, log-normal lengths with a median of {LENGTHS.median:,.0f} tokens, cut at "
                f"{LENGTHS.longest:,}. Processor seconds of one rollout, one thread: `search` finds the plan; `off` "
                "and `auto` (with reconfiguration) simulate it."
            ),
            columns=COLUMNS,
            rows=rows,
            summary=(COLUMNS[:6], [of[:6] for of in rows]),
            notes="The time of a decision is processor time, median of 20.",
        ),
    )


if __name__ == "__main__":
    main()
