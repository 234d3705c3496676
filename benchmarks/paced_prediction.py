"""What the simulator predicts of a paced setting, from its cost tables, acceptance and devices. PURE.

A group of devices is one device of the simulator. It knows no second choices: all decoupled contestants are predicted
alike. Rounds of its decoupled engines last until windows are there; those of real engines take what is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, median

import numpy as np

from benchmarks.paced_devices import MAX_WINDOW, Setting
from benchmarks.plots import number
from specactor.planning.plans import Candidates, Cluster, DrafterEngine, DrafterOption, VerifierOption
from specactor.rollout.speculation.costs import CostTable
from specactor.simulator.decide import Policy
from specactor.simulator.requests import Method, Requests, World
from specactor.simulator.rollout import simulate

DRAFTER = "dialled"
SEEDS = 5  # simulations of each rollout; which requests are easy to draft is drawn
POLICIES = {
    "off": Policy(mode="off", max_window=MAX_WINDOW),
    "coupled": Policy(mode="auto", placement="coupled", fastest=False, max_window=MAX_WINDOW),
    "decoupled": Policy(mode="decoupled", max_window=MAX_WINDOW),
}


def over_off(setting: Setting) -> dict[str, float]:
    """Return predicted tokens/s over plain decoding, by mode."""
    seconds = {
        mode: fmean(_seconds(setting, policy, seed) for seed in range(SEEDS)) for mode, policy in POLICIES.items()
    }
    return {mode: seconds["off"] / own for mode, own in seconds.items()}


def _seconds(setting: Setting, policy: Policy, seed: int) -> float:
    pace, rate = setting.pace, setting.acceptance
    # A request's acceptance is uniform in rate +- spread; the simulator draws its log-odds.
    method = Method(rate=rate, decay=1.0, spread=setting.spread / sqrt(3.0) / (rate * (1.0 - rate)))
    elsewhere = DrafterEngine(devices=1, seconds=pace.draft)
    table = CostTable(
        model="", device="", date="", verify=pace.verify, plain=pace.plain, drafters={DRAFTER: pace.draft}
    )
    drafter = DrafterOption(name=DRAFTER, survival=method.survival(MAX_WINDOW), engines=(elsewhere,))
    return simulate(
        Cluster(devices=setting.groups, requests=setting.batch),
        Candidates(verifiers=(VerifierOption(devices=1, costs=table),), drafters=(drafter,)),
        World(methods={DRAFTER: method}, start_s=0.0, replan_s=0.0),
        policy,
        Requests(
            lengths=np.full(setting.batch, setting.tokens - 1),
            groups=np.arange(setting.batch),
            odds=np.exp(np.random.default_rng(seed).standard_normal(setting.batch)),
        ),
        seed=(seed,),
    ).seconds


def errors(rows: Sequence[Sequence[str]], measured: int, simulated: int) -> str:
    """Say how far predictions are off; args: places in a row of a setting, a contestant, .."""
    cells = [(row[1], number(row[simulated]) / number(row[measured]) - 1.0) for row in rows if row[1] != "off"]
    kinds = {
        "coupled": [error for name, error in cells if name == "coupled"],
        "decoupled, first choices": [error for name, error in cells if name.endswith("alone")],
        "decoupled with second choices, which it does not know": [e for name, e in cells if name == "decoupled"],
    }
    parts = [
        f"{kind} {100 * median(abs(e) for e in found):.0f} % ({100 * min(found):+.0f} to {100 * max(found):+.0f})"
        for kind, found in kinds.items()
        if found
    ]
    typical = 100 * median(abs(error) for _, error in cells)
    return (
        "The simulator was given the cost tables, acceptance and devices of each setting. Median error of tokens/s "
        f"over off, {len(cells)} cells: {typical:.0f} %; {'; '.join(parts)}. It leaves out the machine's own time "
        "between passes, and its decoupled rounds wait for windows, where real ones take what is there."
    )
