"""What a simulation is told: what the planner believes, what is true, and what may be done. PURE: values.

Belief and truth have the same types and are separate objects: cost tables that the planner searches, and those by which
virtual time passes.

Invariant: all times are seconds; what a rollout does depends on these values and on the seed alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from specactor.errors import PlanError
from specactor.planning.plans import Candidates, DrafterEngine, DrafterOption, VerifierOption
from specactor.rollout.speculation.costs import Grid
from specactor.rollout.speculation.reconfiguration import Mode
from specactor.simulator.requests import Method

SimulatedMode = Literal["off", "coupled", "decoupled", "auto"]


@dataclass(frozen=True, kw_only=True)
class Delays:
    """What changing something costs."""

    start_s: float = 5.0
    """From a rollout's begin to the first round: engines take their memory back."""
    replan_s: float = 0.002
    """Of an engine, for deciding anew."""
    rollback_s: float = 0.0005
    """Of a drafter ahead of its verifier, for going back to what was committed, per round in which all requests do."""
    drafter_start_s: float = 2.0
    """Until an engine that ran dry drafts for others: weights, and the prefixes of its requests."""

    def __post_init__(self) -> None:
        if min(self.start_s, self.replan_s, self.rollback_s, self.drafter_start_s) < 0:
            raise PlanError(f"delays: got {self}, expected seconds >= 0.")


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What happens."""

    candidates: Candidates
    """By whose tables rounds take time. Acceptances in it are not looked at."""
    methods: Mapping[str, Method]
    delays: Delays
    message_s: float = 1e-4
    jitter: float = 0.0
    """Standard deviation of the logarithm of engines' slowness: stragglers."""
    alike: float = 0.5
    """See `fastest_of_n.combined`."""

    def __post_init__(self) -> None:
        missing = sorted({d.name for d in self.candidates.drafters} - set(self.methods))
        if missing or self.message_s < 0 or self.jitter < 0 or not 0 <= self.alike <= 1:
            raise PlanError(
                f"truth: got no acceptance of {missing}, message_s {self.message_s}, jitter {self.jitter}, alike "
                f"{self.alike}; expected a Method for every drafter, >= 0, >= 0, 0..1."
            )

    def verifier(self, devices: int) -> VerifierOption:
        """Raises PlanError where belief has an engine that truth has not."""
        found = next((v for v in self.candidates.verifiers if v.devices == devices), None)
        if found is None:
            raise PlanError(f"truth: got an engine of {devices} devices in the plan, and no seconds of such. Add them.")
        return found

    def drafter(self, name: str, devices: int) -> DrafterEngine:
        """The same, of a drafter's engine."""
        engine = drafter_engine(self.candidates, name, devices)
        if engine is None:
            raise PlanError(f"truth: got {name} on {devices} devices in the plan, and no seconds of it. Add them.")
        return engine


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What may be done."""

    mode: SimulatedMode = "auto"
    drafter: str = ""
    """Of modes coupled and decoupled; empty: the one of the best plan."""
    window: int = 0
    """Of mode coupled, fixed; 0: that of the best coupled plan."""
    max_window: int = 8
    placement: Mode | Literal[""] = ""
    """Mode auto: begin with the best plan of that mode; empty: of any."""
    reconfigure: bool = True
    """Mode auto: windows and modes of requests follow what is seen of their acceptance."""
    fastest: bool = True
    """Mode auto: engines that ran dry draft for the others."""
    published: bool = False
    """Algorithm 3 as published, without the stop where nothing is gained."""
    max_load: int = 64
    """Requests of a drafter on an engine that ran dry (b_max)."""

    def __post_init__(self) -> None:
        if self.max_window < 1 or self.window < 0 or self.max_load < 1:
            raise PlanError(
                f"policy: got max_window {self.max_window}, window {self.window}, max_load {self.max_load}; expected "
                ">= 1, >= 0, >= 1."
            )


def slower(candidates: Candidates, *, round_s: float = 0.0, draft_step_s: float = 0.0) -> Candidates:
    """The same with rounds of verifiers, and steps of drafters, that take so much longer wherever they run."""

    def draft(grid: Grid) -> Grid:
        return _longer(grid, [draft_step_s * window for window in grid.per_request])

    def verify(grid: Grid) -> Grid:
        return _longer(grid, [round_s] * len(grid.per_request))

    return Candidates(
        verifiers=tuple(
            replace(
                option,
                costs=replace(
                    option.costs,
                    verify=verify(option.costs.verify),
                    plain=verify(option.costs.plain),
                    drafters={name: draft(grid) for name, grid in option.costs.drafters.items()},
                ),
            )
            for option in candidates.verifiers
        ),
        drafters=tuple(
            replace(option, engines=tuple(replace(e, seconds=draft(e.seconds)) for e in option.engines))
            for option in candidates.drafters
        ),
    )


def _longer(grid: Grid, more: list[float]) -> Grid:
    return replace(grid, seconds=tuple(tuple(s + m for s, m in zip(row, more, strict=True)) for row in grid.seconds))


def drafter_option(candidates: Candidates, name: str) -> DrafterOption | None:
    return next((d for d in candidates.drafters if d.name == name), None)


def drafter_engine(candidates: Candidates, name: str, devices: int) -> DrafterEngine | None:
    """Of exactly so many devices."""
    option = drafter_option(candidates, name)
    return next((e for e in option.engines if e.devices == devices), None) if option else None
