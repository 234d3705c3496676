"""What an engine of the simulator gets to know of its past. PURE: randomness is passed in.

A real engine sees every verify and the seconds of every round. Here rounds are aggregated, so its estimators are shown
a sample: enough to learn from, few enough to be quick. A sampled verify accepts as many draft tokens as one uniform
number is below their survivals, which has their law.

Invariants: nothing is shown before it has happened; at least one verify of every running request between two
decisions; a method that did not draft is shown as a look, and only while decoding is plain.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specactor.rollout.simulator.engine import Engine
from specactor.rollout.simulator.requests import Floats, Ints

SAMPLED = 256
"""Verifies that an engine is shown between two decisions, of all its requests together, if it has that many."""
MOST_SAMPLED = 8
"""Verifies of one request among them, at most."""
SHOWN_ROUNDS = 5
"""Rounds whose seconds it is shown: as many as `costs.MIN_RATIOS`."""


def show(
    engine: Engine,
    survivals: Callable[[Ints, str], Floats],
    name_of: Callable[[int], str],
    rng: np.random.Generator,
    *,
    max_window: int,
) -> None:
    """The decider learns of some verifies, and what rounds took, since it decided. `survivals`: true ones, of requests
    and a method, [B, >= max_window]."""
    rounds = engine.rounds - engine.rounds_decided
    if rounds < 1 or engine.round is None:
        return
    requests, of = len(engine.running), engine.decision
    each = int(max(1, min(rounds, MOST_SAMPLED, SAMPLED // requests)))
    drafting = bool((of.windows > 0).any())

    def verifies(method: str, window_B: Ints, each: int) -> None:
        survival_BW = survivals(engine.running, method)[:, :max_window]
        right_KB = (survival_BW > rng.random((each, requests, 1))).sum(axis=2)
        for i, window, right_K in zip(engine.running.tolist(), window_B.tolist(), right_KB.T.tolist(), strict=True):
            for right in right_K if window else ():
                engine.decider.saw(method, name_of(i), asked=window, accepted=min(right, window))

    for method in [of.drafter] if drafting else list(engine.decider.acceptance):
        verifies(method, of.windows if drafting else np.full(requests, max_window), each if drafting else 1)
    for method, some in engine.beside.items():
        verifies(method, np.where(np.isin(engine.running, list(some)), max_window, 0), 1)
    engine.decider.took(of, requests=requests, seconds=engine.first_round_s, rounds=int(min(rounds, SHOWN_ROUNDS)))
