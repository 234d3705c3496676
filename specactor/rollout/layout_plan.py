"""Which engines generate a rollout, and on which devices drafters draft for them. PURE: counts and seconds in, layouts
out.

The search of `specactor plan` compares what the engines of one rank could do: all are given requests, and decode
plainly or draft within themselves; or some are, and drafters that sleep on the devices of others draft for these from
the start. Engines still decide in every round whether and how far to draft, and `tail_plan` what to do later.

Engines are positions here. The acceptance is that of the drafts which engines verified before, so nothing is expected
of a method that nobody has seen.

Invariants: at least one engine serves, and none both serves and drafts; only drafters that sleep are counted on;
a layout with drafters is taken only if it is predicted to be faster than all engines serving by more than `margin`,
waking included; where no draft of a drafter process or its model was verified yet, all serve; equal input gives equal
layouts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from specactor.config import RolloutConfig
from specactor.rollout.draft.counts import Counts
from specactor.rollout.planning.candidates import from_table
from specactor.rollout.planning.costs import METHOD, CostTable
from specactor.rollout.planning.plans import Cluster, Footprint, RolloutPlan
from specactor.rollout.planning.rounds import survival_of
from specactor.rollout.planning.search import search
from specactor.rollout.tail_plan import TailCosts

MARGIN = 0.1
"""About what predictions err by."""
IN_ENGINE = "model"
"""The method that drafts with the model of drafter processes."""
SLOT = Footprint(weights_bytes=0.0, request_bytes=1.0)
"""Of a request, where engines are as large as they have slots."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Of one rollout."""

    serving: tuple[int, ...]
    """They are given requests."""
    drafting: tuple[int, ...] = ()
    """The drafters on their devices are woken at once."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class LayoutPlanner:
    """The costs of engines and a drafter process, and what is believed of a rollout."""

    table: CostTable
    methods: Collection[str]
    """That engines draft with."""
    slots: int
    """Requests that an engine decodes together."""
    max_window: int
    margin: float = MARGIN
    acceptance: Mapping[str, float] = field(default_factory=dict)
    """P(the first draft token is accepted), by method."""
    response_tokens: float = 0.0
    """Of a response, on average; 0: not known."""

    def layout(self, wakes_s: Sequence[float | None], *, groups: int, requests: int) -> Layout:
        """Args: for each engine, seconds until the drafter on its device is awake, None where none sleeps; groups and
        requests of the rollout. Requests of a group have one engine."""
        engines = len(wakes_s)
        sleeping = sorted((wake_s, -engine) for engine, wake_s in enumerate(wakes_s) if wake_s is not None)
        known = self.table.process is not None and self.response_tokens > 0 and self._believed(METHOD) > 0
        if not (known and sleeping and 1 < engines <= groups):
            return _all(engines, "there is nothing to compare with")
        plans = self._plans(engines, requests)
        together = next(plan for plan in plans if plan.mode != "decoupled")
        apart = next((plan for plan in plans if plan.mode == "decoupled"), None)
        if apart is None:
            return _all(engines, together.reason)
        if apart.drafters.engines > len(sleeping):
            return _all(engines, f"{apart.drafters.engines} drafters would pay, and {len(sleeping)} sleep")
        chosen = sleeping[: apart.drafters.engines]
        wait_s = chosen[-1][0] + TailCosts.notice_rounds * self.table.plain_s(apart.requests_per_engine)
        tokens = requests * self.response_tokens
        faster = tokens / together.tokens_per_s / (wait_s + tokens / apart.tokens_per_s)
        if faster <= 1.0 + self.margin:
            return _all(engines, f"drafters on devices of others are predicted to be {faster:.2f} times as fast")
        drafting = sorted(-engine for _, engine in chosen)
        serving = [engine for engine in range(engines) if engine not in drafting]
        return Layout(
            serving=tuple(serving),
            drafting=tuple(drafting),
            reason=f"{len(serving)} of {engines} engines serve, for which drafters on the devices of {len(drafting)} "
            f"draft, predicted to be {faster:.2f} times as fast as all: {apart.reason}",
        )

    def after(self, counts: Mapping[str, Counts]) -> LayoutPlanner:
        """The planner of the next step. Args: what speculation did in this one, per drafter."""
        seen = {name: counts.get(name, Counts()) for name in self.methods}
        acceptance = {name: own.acceptance(self.acceptance.get(name, 0.0)) for name, own in seen.items()}
        return replace(self, acceptance=acceptance)

    def _plans(self, engines: int, requests: int) -> list[RolloutPlan]:
        """Fastest first. An engine counts as one device."""
        table = self.table.only(self.methods)
        survivals = {name: survival_of(self._believed(name), self.max_window + 1) for name in table.methods}
        found = from_table(table, devices=1, survivals=survivals)
        return search(
            Cluster(devices=engines, requests=requests),
            [replace(option, footprint=SLOT, capacity_bytes=float(self.slots)) for option in found.verifiers],
            found.drafters,
            max_window=self.max_window,
        )

    def _believed(self, method: str) -> float:
        own = self.acceptance.get(method, 0.0)
        return own or (self.acceptance.get(IN_ENGINE, 0.0) if method == METHOD else 0.0)


def may_plan(config: RolloutConfig) -> bool:
    """Whether a run wants layouts, if its cost table has what it takes."""
    return config.tail.drafters and config.speculation.mode == "auto" and bool(config.speculation.cost_table)


def layout_planner(config: RolloutConfig, table: CostTable | None) -> LayoutPlanner | None:
    """What a run asked for; None: all engines serve in every rollout, as where the table lacks one of the methods, with
    which all of them might be faster."""
    speculation = config.speculation
    if table is None or not may_plan(config) or not {*speculation.draft_methods} <= {*table.methods}:
        return None
    return LayoutPlanner(
        table=table,
        methods=speculation.draft_methods,
        slots=config.engine.max_running_requests,
        max_window=speculation.largest_window,
    )


def _all(engines: int, why: str) -> Layout:
    return Layout(serving=tuple(range(engines)), reason=f"all {engines} engines serve: {why}")
