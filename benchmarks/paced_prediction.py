"""What the simulator predicts of a paced setting, from its cost tables, acceptance and devices. PURE.

A group of devices is one device of the simulator. It is told what the coins of each request say, since in few batches
the slowest request decides; it knows no second choices: all decoupled contestants are predicted alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import sqrt
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from benchmarks.paced_devices import MAX_WINDOW, Setting, requests, script_of
from benchmarks.plots import number
from specactor.planning.plans import Candidates, Cluster, DrafterEngine, DrafterOption, VerifierOption
from specactor.rollout.speculation.costs import CostTable
from specactor.simulator.engine import Policy
from specactor.simulator.requests import Method, Requests, World
from specactor.simulator.rollout import simulate

DRAFTER = "dialled"
BATCHES = 2  # of requests whose coins are known
WINDOWS = (2, 4, 8)  # over which a request's luck is averaged
MESSAGES_S = 1e-3  # from an engine to its drafter and back, on this machine
POLICIES = {
    "off": Policy(mode="off", max_window=MAX_WINDOW),
    "coupled": Policy(mode="auto", placement="coupled", max_window=MAX_WINDOW),
    "decoupled": Policy(mode="decoupled", max_window=MAX_WINDOW),
}


def over_off(setting: Setting, host_s: float = 0.0) -> dict[str, float]:
    """Return predicted tokens/s over plain decoding, by mode; `host_s`: between two passes, dilated."""
    batches = [Known.of(setting, batch) for batch in range(BATCHES)]
    seconds = {
        mode: fmean(_seconds(setting, policy, known, host_s / setting.pace.dilation) for known in batches)
        for mode, policy in POLICIES.items()
    }
    return {mode: seconds["off"] / own for mode, own in seconds.items()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Known:
    """What the coins of a batch say of each of its N requests."""

    rates: NDArray[np.float64]  # [N], acceptance
    lucks: NDArray[np.float64]  # [N], see `Requests.luck`
    lengths: NDArray[np.int64]  # [N], tokens after the first

    @classmethod
    def of(cls, setting: Setting, batch: int) -> Known:
        script = script_of(setting, runner_up=0.0)
        rates, lucks, lengths = [], [], []
        for request in requests(setting, batch):
            rates.append(min(1.0, script.own(request.seed)))
            right = [script.is_right(request.seed, at) for at in range(1, request.sampling.max_new_tokens)]
            lengths.append(len(right))
            lucks.append(fmean(luck(right, rates[-1], window) for window in WINDOWS))
        return cls(rates=np.array(rates), lucks=np.array(lucks), lengths=np.array(lengths))


EQUAL = 1e-9  # variance of rounds that all emit as much


def luck(right: Sequence[bool], rate: float, window: int) -> float:
    """Return the luck with which `Progress` needs as many rounds of this window as these coins do."""
    depth_W = np.arange(1, window + 1)
    survival_W = rate**depth_W
    accepted = float(survival_W.sum())
    mean, variance = 1.0 + accepted, float((2.0 * depth_W - 1.0) @ survival_W) - accepted**2
    if variance <= EQUAL:  # all rounds emit as much: luck changes nothing
        return 0.0
    at = rounds = 0
    while at < len(right):
        at += 1 + sum(1 for _ in takewhile(bool, right[at : at + window]))
        rounds += 1
    beyond = ((variance + mean**2) / mean - 1.0) / 2.0
    return (len(right) + beyond - rounds * mean) / sqrt(rounds * variance)


def _odds(rate: float | NDArray[np.float64]) -> NDArray[np.float64]:
    share = np.clip(rate, EQUAL, 1.0 - EQUAL)  # finite ones, also where all is right
    return np.asarray(share / (1.0 - share))


def _seconds(setting: Setting, policy: Policy, known: Known, host_s: float) -> float:
    pace, rate = setting.pace, setting.acceptance
    method = Method(rate=rate, decay=1.0, spread=1.0)
    elsewhere = DrafterEngine(devices=1, seconds=setting.drafter or pace.draft)
    beside = setting.drafter is not None and policy.mode == "decoupled"  # devices of a drafter alone
    table = CostTable(
        model="", device="", date="", verify=pace.verify, plain=pace.plain, drafters={DRAFTER: pace.draft}
    )
    drafter = DrafterOption(name=DRAFTER, survival=method.survival(MAX_WINDOW), engines=(elsewhere,))
    return simulate(
        Cluster(
            devices=setting.groups + beside,
            requests=setting.batch,
            message_s=MESSAGES_S / pace.dilation + 2 * setting.link_s,
        ),
        Candidates(verifiers=(VerifierOption(devices=1, costs=table),), drafters=(drafter,)),
        World(methods={DRAFTER: method}, start_s=0.0, replan_s=0.0, host_s=host_s),
        policy,
        Requests(
            lengths=known.lengths,
            groups=np.arange(setting.batch),
            odds=_odds(known.rates) / _odds(rate),
            luck=known.lucks,
        ),
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
    said = "; ".join(parts) + ". It leaves out what speculation adds between passes, and second choices."
    return (
        "The simulator was given the cost tables, each request's acceptance and how lucky its coins are, and the time "
        "between two passes of plain decoding. Median error of tokens/s over off, "
        f"{len(cells)} cells: {typical:.0f} %; {said}"
    )
