"""What the simulator predicts of a paced setting, from its cost tables, acceptance and devices. PURE.

A group of devices is one device of the simulator. It knows no second choices: all decoupled contestants are predicted
alike. Rounds of its decoupled engines last until windows are there; those of real engines take what is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from benchmarks.paced_devices import MAX_WINDOW, Setting, requests, script_of
from benchmarks.plots import number
from specactor.planning.plans import Candidates, Cluster, DrafterEngine, DrafterOption, VerifierOption
from specactor.rollout.speculation.costs import CostTable
from specactor.simulator.decide import Policy
from specactor.simulator.requests import Method, Requests, World
from specactor.simulator.rollout import simulate

DRAFTER = "dialled"
BATCHES = 2  # whose requests' acceptance is told
SEEDS = 5  # simulations of each; which requests are lucky is drawn
MESSAGES_S = 1e-3  # from an engine to its drafter and back, on this machine
POLICIES = {
    "off": Policy(mode="off", max_window=MAX_WINDOW),
    "coupled": Policy(mode="auto", placement="coupled", fastest=False, max_window=MAX_WINDOW),
    "decoupled": Policy(mode="decoupled", max_window=MAX_WINDOW),
}


def over_off(setting: Setting, host_s: float = 0.0) -> dict[str, float]:
    """Return predicted tokens/s over plain decoding, by mode; `host_s`: between two passes, dilated."""
    batches = [rates(setting, batch) for batch in range(BATCHES)]
    seconds = {
        mode: fmean(
            _seconds(setting, policy, rate_N, host_s / setting.pace.dilation, (seed, batch))
            for seed in range(SEEDS)
            for batch, rate_N in enumerate(batches)
        )
        for mode, policy in POLICIES.items()
    }
    return {mode: seconds["off"] / own for mode, own in seconds.items()}


def rates(setting: Setting, batch: int) -> NDArray[np.float64]:
    """Return the acceptance of each request of a batch."""
    script = script_of(setting, second=0.0)
    return np.array([script.own(request.seed) for request in requests(setting, batch)])


def _seconds(
    setting: Setting, policy: Policy, rate_N: NDArray[np.float64], host_s: float, seed: tuple[int, int]
) -> float:
    pace, rate = setting.pace, setting.acceptance
    method = Method(rate=rate, decay=1.0, spread=1.0)
    elsewhere = DrafterEngine(devices=1, seconds=pace.draft)
    table = CostTable(
        model="", device="", date="", verify=pace.verify, plain=pace.plain, drafters={DRAFTER: pace.draft}
    )
    drafter = DrafterOption(name=DRAFTER, survival=method.survival(MAX_WINDOW), engines=(elsewhere,))
    return simulate(
        Cluster(devices=setting.groups, requests=setting.batch, message_s=MESSAGES_S / pace.dilation),
        Candidates(verifiers=(VerifierOption(devices=1, costs=table),), drafters=(drafter,)),
        World(methods={DRAFTER: method}, start_s=0.0, replan_s=0.0, host_s=host_s),
        policy,
        Requests(
            lengths=np.full(setting.batch, setting.tokens - 1),
            groups=np.arange(setting.batch),
            odds=rate_N / (1.0 - rate_N) * (1.0 - rate) / rate,
        ),
        seed=seed,
    ).seconds


def errors(rows: Sequence[Sequence[str]], measured: int, simulated: int) -> str:
    """Say how far predictions are off; args: places in a row of a setting, a contestant, .."""
    cells = [
        (row[1], number(row[simulated]) / number(row[measured]) - 1.0)
        for row in rows
        if row[1] != "off" and row[simulated] != "-"
    ]
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
