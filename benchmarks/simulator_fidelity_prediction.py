"""What the simulator predicts of a rollout that was run, and how far off it is. PURE: counts in, seconds out.

The simulator is told the lengths of the run's responses, cost tables of the machine, and of each drafter what was
counted: how often its first j draft tokens were accepted, and how many it found. It is not told any seconds of the run.

Invariants: no measured rollout is an argument of `predicted_s`; prefills are in neither time, so a response counts
without its first token, which its prefill emits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median

import numpy as np

from benchmarks.results import Table
from specactor.planning.plans import Cluster, from_table
from specactor.rollout.speculation.costs import CostTable
from specactor.rollout.speculation.counters import Counts
from specactor.simulator.decide import Policy
from specactor.simulator.requests import Method, Requests, World
from specactor.simulator.rollout import simulate

SEEDS = 5  # simulations of each rollout; which requests are easy to draft is drawn
LEAST_FOUND = 0.05  # share of its windows that a drafter is taken to fill at least
LEAST_RIGHT = 1e-9
"""Survival that is believed at least: without any there is no plan, and fixed windows are run all the same."""
MEDIAN_AIM, LARGEST_AIM = 0.10, 0.25


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a rollout is run."""

    batch: int  # requests at once
    drafters: tuple[str, ...] = ()  # none: off
    window: int | None = None  # none: chosen
    auto: bool = False

    @property
    def mode(self) -> str:
        if not self.drafters:
            return "off"
        return "auto" if self.auto else f"coupled, window {self.window or 'chosen'}"


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Of one drafter's draft tokens, as a run counted them."""

    rates: tuple[float, ...]
    """P(accepted at position j | those before were), of all rounds, also those without a draft."""
    found: float  # draft tokens that were verified, as a share of all that its windows had room for

    @classmethod
    def of(cls, counts: Counts, *, tokens: int, window: int) -> Seen:
        """`tokens`: that the run emitted without prefills. Each round of a request emits one token and what it accepts,
        so rounds need no count."""
        rounds = tokens - counts.accepted
        reached = [rounds, *counts.accepted_at[:window]]
        rates = [after / before if before else 0.0 for before, after in pairwise(reached)]
        found = min(1.0, counts.drafted / (rounds * window))
        return cls(rates=tuple(min(1.0, rate) for rate in rates), found=found)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One setting."""

    setting: Setting
    measured_s: float  # median of repetitions
    predicted_s: float
    tokens: int

    @property
    def error(self) -> float:
        """Relative to what was measured; positive where the simulator is too slow."""
        return self.predicted_s / self.measured_s - 1

    def row(self) -> list[str]:
        return [
            f"{self.setting.mode}",
            " ".join(self.setting.drafters) or "-",
            str(self.setting.batch),
            f"{self.tokens / self.measured_s:.0f}",
            f"{self.measured_s:.3f}",
            f"{self.predicted_s:.3f}",
            f"{self.error:+.1%}",
        ]


COLUMNS = ("mode", "drafter", "batch", "tokens/s", "measured s", "predicted s", "error")


def told(table: CostTable, found: Mapping[str, float]) -> CostTable:
    """The table of rounds whose windows are not filled: `found` of each drafter, the largest of them counts.

    Time along the axis of tokens per request passes at the rate at which windows are filled.
    """
    share = max([LEAST_FOUND, *found.values()]) if found else 1.0
    each = tuple(1.0 + (tokens - 1.0) / share for tokens in table.verify.per_request)
    return replace(
        table,
        verify=replace(table.verify, per_request=each),
        drafters={name: table.drafters[name] for name in found},
    )


def predicted_s(
    setting: Setting,
    table: CostTable,
    seen: Mapping[str, Seen],
    lengths: Sequence[int],
    groups: Sequence[int],
    *,
    max_window: int,
) -> float:
    """Seconds of the rollout of requests of so many tokens (prefills' too), mean of SEEDS simulations.

    Raises PlanError where a drafter is not in the table.
    """
    methods = {name: Method(rate=seen[name].rates[0], by_position=seen[name].rates) for name in setting.drafters}
    costs = told(table, {name: seen[name].found for name in setting.drafters})
    survivals = {n: tuple(max(s, LEAST_RIGHT) for s in m.survival(max_window)) for n, m in methods.items()}
    candidates = from_table(costs, devices=1, survivals=survivals)
    world = World(methods=methods, start_s=0.0, replan_s=0.0)
    decoded = [(tokens - 1, group) for tokens, group in zip(lengths, groups, strict=True) if tokens > 1]
    cluster = Cluster(devices=1, requests=len(decoded))
    return mean(
        simulate(
            cluster,
            candidates,
            world,
            _policy(setting, max_window),
            Requests(
                lengths=np.array([tokens for tokens, _ in decoded], np.int64),
                groups=np.array([group for _, group in decoded], np.int64),
                odds=np.exp(np.random.default_rng(seed).standard_normal(len(decoded))),
            ),
            seed=(seed,),
        ).seconds
        for seed in range(SEEDS)
    )


def _policy(setting: Setting, max_window: int) -> Policy:
    """Windows that are chosen follow what is seen, which is mode auto of the simulator."""
    if not setting.drafters:
        return Policy(mode="off", max_window=max_window)
    if setting.window is not None:
        return Policy(mode="coupled", drafter=setting.drafters[0], window=setting.window, max_window=max_window)
    return Policy(mode="auto", placement="" if setting.auto else "coupled", max_window=max_window)


def summary(found: Sequence[Comparison]) -> str:
    """Errors beside their aims, and what would have been lost by running the setting that is predicted fastest."""
    errors = [abs(one.error) for one in found]
    met = "met" if median(errors) <= MEDIAN_AIM and max(errors) <= LARGEST_AIM else "not met"
    kept = min(_kept([one for one in found if one.setting.batch == b]) for b in {one.setting.batch for one in found})
    return (
        f"{len(found)} settings: median error {median(errors):.1%} (aim: at most {MEDIAN_AIM:.0%}), largest "
        f"{max(errors):.1%} (aim: at most {LARGEST_AIM:.0%}); {met}. The setting that is predicted fastest at its "
        f"batch has {kept:.2f} of the speed of the one that is, or more."
    )


def by_batch(found: Sequence[Comparison]) -> Table:
    """Errors by batch, and which setting is off most."""
    rows = []
    for batch in dict.fromkeys(one.setting.batch for one in found):
        own = [one for one in found if one.setting.batch == batch]
        worst = max(own, key=lambda one: abs(one.error))
        error = f"{median(abs(one.error) for one in own):.1%}"
        rows.append([str(batch), str(len(own)), error, f"{worst.error:+.1%}", ", ".join(worst.row()[:2])])
    return ("batch", "settings", "median error", "largest", "which"), rows


def _kept(found: Sequence[Comparison]) -> float:
    picked = min(found, key=lambda one: one.predicted_s)
    return min(one.measured_s for one in found) / picked.measured_s
