"""An engine of the simulator: what it decides, by the functions that a real one calls, and how far its requests are.
PURE. Invariants: `decide` uses what `saw` and `took` were given before; only in auto requests leave the rollout's plan;
time does not go back; tokens never exceed a request's length. Shapes: B running requests, N all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from specactor.errors import PlanError
from specactor.planning.plans import Candidates, Cluster, Mode, RolloutPlan, VerifierOption
from specactor.planning.search import search
from specactor.rollout.speculation.acceptance import AcceptanceModel
from specactor.rollout.speculation.costs import MIN_ROUNDS, OnlineCosts
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.planner import of_drafter
from specactor.rollout.speculation.windows import OFF as NO_DRAFTER
from specactor.rollout.speculation.windows import Choice, choose
from specactor.simulator.requests import (
    COUPLED,
    DECOUPLED,
    MODES,
    OFF,
    Flags,
    Floats,
    Ints,
    Progress,
    Remote,
    Round,
    round_of,
)

SimulatedMode = Literal["off", "coupled", "decoupled", "auto"]
AHEAD = "decoupled"  # what the plan of requests drafted for elsewhere is called among the choices
FIRST_LOOK, LAST_LOOK = 4, 1024
"""Rounds after which an engine decides anew where nothing else happens: at first and when it has changed its mind, and
later, doubled each time. (A real one decides in every round, mostly the same.)"""


@dataclass(frozen=True, kw_only=True)
class Policy:
    mode: SimulatedMode = "auto"
    drafter: str = ""  # of modes coupled and decoupled; empty: the one of the best plan
    window: int = 0  # of mode coupled, fixed; 0: that of the best coupled plan
    max_window: int = 8
    placement: Mode | Literal[""] = ""  # mode auto: begin with the best plan of that mode; empty: of any
    reconfigure: bool = True  # mode auto: windows and modes of requests follow what is seen of their acceptance


def placed(cluster: Cluster, belief: Candidates, policy: Policy) -> RolloutPlan:
    """Return the fastest plan of the policy's mode. Raises PlanError for none."""
    plans = search(cluster, belief.verifiers, belief.drafters, max_window=policy.max_window)
    if policy.mode != "auto" or policy.placement:
        plans = [plan for plan in plans if plan.mode == (policy.placement or policy.mode)]
    if policy.drafter and policy.mode in ("coupled", "decoupled"):
        plans = [plan for plan in plans if plan.drafter == policy.drafter]
    if not plans:
        wanted = " ".join(word for word in (policy.mode, policy.placement, policy.drafter) if word)
        raise PlanError(
            f"policy: got mode {wanted}, and no such plan fits; expected a drafter with memory and acceptance for it. "
            "Leave this mode out, or add the drafter."
        )
    plan = plans[0]
    if policy.mode == "coupled" and policy.window:
        plan = replace(plan, window=min(policy.window, policy.max_window))
    return plan


@dataclass(frozen=True, kw_only=True, eq=False)
class Decision:
    drafter: str  # whose tokens are verified; NO_DRAFTER for nobody's
    modes: Ints  # [B]
    windows: Ints  # [B]
    kind: str = NO_DRAFTER  # as its rounds are called in `OnlineCosts`
    predicted_s: float = 0.0  # of a round, uncorrected; 0: nothing was predicted


class Decider:
    def __init__(
        self,
        plan: RolloutPlan,
        believed: VerifierOption,
        policy: Policy,
        remote: Remote | None,
        *,
        fits: Mapping[str, int | None],
        survivals: Mapping[str, Sequence[float]],
    ) -> None:
        """Believe `survivals` until drafters are seen; `fits`: requests beside which each fits here, None: any."""
        self.fits = fits
        self.plan, self.policy, self.believed, self.remote = plan, policy, believed, remote
        self.costs = OnlineCosts(believed.costs)
        self.local = tuple(sorted(believed.costs.drafters))
        names = {*self.local, *([plan.drafter] if plan.window else [])}
        self.acceptance = {name: self._model(survivals[name]) for name in sorted(names)}
        self._current = NO_DRAFTER

    @property
    def adapts(self) -> bool:
        return self.policy.mode == "auto" and self.policy.reconfigure

    def _model(self, survival: Sequence[float]) -> AcceptanceModel:
        first, second = [*survival, 0.0][:2]  # acceptance a_1, and a_1 * a_2
        decay = min(1.0, max(0.01, second / max(first, 0.01) ** 2))
        rate = min(max(first, 0.01), 0.99)
        return AcceptanceModel(max_window=self.policy.max_window, prior_rate=rate, prior_decay=decay)

    def decide(self, sequences: Sequence[DraftSequence], served: float) -> Decision:
        requests = len(sequences)
        if not self.adapts:
            plan = self.plan
            if self.remote is not None and plan.mode == "decoupled":
                choice = self._ahead(sequences, replace(self.remote, served=max(served, 1.0, requests)))
                plan = replace(plan, window=choice.windows[0])
            return _same(plan.mode, plan.drafter, plan.window, requests)
        caps = [self.policy.max_window] * requests
        options = {
            name: of_drafter(name, self.acceptance[name], self.costs, sequences, caps, None).corrected(
                self.costs.correction.factor(name)
            )
            for name in self.local
            if (most := self.fits.get(name)) is None or requests <= most
        }
        if self.remote is not None:
            choice = self._ahead(sequences, replace(self.remote, served=max(served, 1.0)))
            options[AHEAD] = choice.corrected(self.costs.correction.factor(AHEAD))
        chosen = choose(options, requests=requests, plain_s=self.costs.plain_s(requests), current=self._current)
        self._current = chosen.drafter
        if not any(chosen.windows):
            factor = self.costs.correction.factor(NO_DRAFTER)
            return replace(_same("off", NO_DRAFTER, 0, requests), predicted_s=self.costs.plain_s(requests) / factor)
        uncorrected_s = chosen.round_s / chosen.factor
        window_B = np.array(chosen.windows, np.int64)
        if chosen.drafter == AHEAD:
            mode_B, drafter = np.where(window_B > 0, DECOUPLED, OFF), self.plan.drafter
        else:
            mode_B, drafter = np.where(window_B > 0, COUPLED, OFF), chosen.drafter
        return Decision(drafter=drafter, modes=mode_B, windows=window_B, kind=chosen.drafter, predicted_s=uncorrected_s)

    def _ahead(self, sequences: Sequence[DraftSequence], remote: Remote) -> Choice:
        """Choose one bound for all requests on what a round takes of what is there."""
        name, table, requests = self.plan.drafter, self.believed.costs, len(sequences)
        survival_BW = self.acceptance[name].survivals([s.request_id for s in sequences], covered=False)
        mode_B = np.full(requests, DECOUPLED)
        found = [
            round_of(survival_BW, mode_B, np.full(requests, window), table=table, drafter=name, remote=remote)
            for window in range(1, self.policy.max_window + 1)
        ]
        best = max(range(len(found)), key=lambda i: float(found[i].tokens.sum()) / found[i].seconds)
        emitted, seconds = float(found[best].tokens.sum()), found[best].seconds
        return Choice(windows=(best + 1,) * requests, emitted=emitted, round_s=seconds)

    def saw(self, method: str, request_ids: Sequence[str], *, asked: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from one round's verifies, of different requests."""
        self.acceptance[method].observe_all(request_ids, asked, accepted, asked=asked)

    def took(self, decision: Decision, *, requests: int, seconds: float, rounds: int) -> None:
        if self.adapts and decision.predicted_s > 0:
            for _ in range(rounds):
                self.costs.observe(
                    decision.kind,
                    requests=requests,
                    rows=requests,
                    depth=0,
                    verify_s=seconds,
                    draft_s=0.0,
                    predicted_s=decision.predicted_s,
                )

    def forget(self, request_id: str) -> None:
        for model in self.acceptance.values():
            model.forget(request_id)


def _same(mode: Mode, drafter: str, window: int, requests: int) -> Decision:
    return Decision(
        drafter=drafter,
        modes=np.full(requests, MODES.index(mode)),
        windows=np.full(requests, window, np.int64),
    )


class Engine:
    """Rounds between two events are not simulated one by one."""

    def __init__(self, index: int, option: VerifierOption, decider: Decider, slow: float) -> None:
        self.index, self.option, self.decider, self.slow = index, option, decider, slow
        self.running: Ints = np.zeros(0, np.int64)
        self.waiting: deque[int] = deque()
        self.decision = Decision(drafter="", modes=self.running, windows=self.running)
        self.round: Round | None = None
        self.since = 0.0  # until when it was accounted for
        self.busy_s = 0.0
        self.rounds, self.emitted, self.drafted, self.accepted = 0.0, 0.0, 0.0, 0.0
        self.first_round_s = 0.0  # seconds of a round just after the last decision
        self.decisions = 0
        self.rounds_decided = 0.0
        self.requests_decided = 0
        self._look = FIRST_LOOK
        self._new = 0

    def admit(self, room: int | None) -> None:
        """Take those for which there is room. New requests do what most do, the first what was planned."""
        most = len(self.waiting) if room is None else min(len(self.waiting), max(0, room - len(self.running)))
        if not most:
            return
        new = np.array([self.waiting.popleft() for _ in range(most)], np.int64)
        plan, of = self.decider.plan, self.decision
        mode, window = MODES.index(plan.mode), plan.window
        if len(self.running):
            i = int(of.windows.argsort(kind="stable")[len(self.running) // 2])
            mode, window = int(of.modes[i]), int(of.windows[i])
        self.running = np.concatenate([self.running, new])
        self.decision = replace(
            of,
            drafter=of.drafter or plan.drafter,
            modes=np.concatenate([of.modes, np.full(len(new), mode, np.int64)]),
            windows=np.concatenate([of.windows, np.full(len(new), window, np.int64)]),
        )
        self._new += len(new)

    def settle(self, now: float, progress: Progress) -> None:
        if self.round is None or now <= self.since:
            return
        rounds = (now - self.since) / self.round.seconds
        progress.add(self.running, self.round, rounds)
        self.rounds += rounds
        self.emitted += rounds * float(self.round.tokens.sum())
        self.drafted += rounds * float(self.round.drafted.sum())
        self.accepted += rounds * float(self.round.tokens.sum() - len(self.running))
        self.busy_s += now - self.since
        self.since = now

    def lucky(self, tokens: float) -> None:
        """Count what ended requests emitted beyond the mean, accepted of drafts like those before."""
        self.emitted += tokens
        if self.accepted > 0:  # without drafts tokens are a rounding error
            self.drafted *= 1.0 + tokens / self.accepted
            self.accepted += tokens

    def remove(self, gone_B: Flags) -> Ints:
        gone = self.running[gone_B]
        self.running = self.running[~gone_B]
        of = self.decision
        self.decision = replace(of, modes=of.modes[~gone_B], windows=of.windows[~gone_B])
        return gone

    def is_due(self) -> bool:
        # The batch has changed by an eighth, or it is time to look.
        now, then = len(self.running), self.requests_decided
        return (abs(now - then) + self._new) * 8 >= max(then, 1) or self.rounds - self.rounds_decided >= self._look * (
            1 - 1e-9
        )

    def decided(self, decision: Decision) -> None:
        assert len(decision.modes) == len(self.running), self.index
        self._look = min(2 * self._look, LAST_LOOK) if decision.kind == self.decision.kind else FIRST_LOOK
        self.decision = decision
        self.decisions += 1
        self._new = 0
        self.rounds_decided, self.requests_decided = self.rounds, len(self.running)

    def set_round(self, found: Round) -> None:
        self.round = found
        if self.rounds == self.rounds_decided:
            self.first_round_s = found.seconds

    def next_s(self, rounds_B: Floats) -> float:
        assert self.round is not None
        look = self._look - (self.rounds - self.rounds_decided) if self.decider.adapts else LAST_LOOK
        return self.since + max(min(float(rounds_B.min()), max(look, 1.0)), 0.0) * self.round.seconds


def show(
    engine: Engine,
    survivals: Callable[[Ints, str], Floats],
    name_of: Callable[[int], str],
    rng: np.random.Generator,
    *,
    max_window: int,
) -> None:
    """Show the decider some verifies, at most 8 of a request and 256 in all, and seconds of rounds, since it decided;
    methods that did not draft as probes, while decoding is plain. `survivals` are the true ones, [B, >= max_window]."""
    rounds = engine.rounds - engine.rounds_decided
    if rounds < 1 or engine.round is None:
        return
    requests, of = len(engine.running), engine.decision
    each = int(max(1, min(rounds, 8, 256 // requests)))
    drafting = bool((of.windows > 0).any())

    names = [name_of(i) for i in engine.running.tolist()]

    # a sampled verify accepts as many draft tokens as one uniform number is below their survivals: that is their law.
    def verifies(method: str, window_B: Ints, each: int) -> None:
        survival_BW = survivals(engine.running, method)[:, :max_window]
        right_KB = (survival_BW > rng.random((each, requests, 1))).sum(axis=2)
        for accepted_B in np.minimum(right_KB, window_B):  # by rounds, as an engine sees them
            engine.decider.saw(method, names, asked=window_B.tolist(), accepted=accepted_B.tolist())

    for method in [of.drafter] if drafting else list(engine.decider.acceptance):
        verifies(method, of.windows if drafting else np.full(requests, max_window), each if drafting else 1)
    engine.decider.took(of, requests=requests, seconds=engine.first_round_s, rounds=int(min(rounds, MIN_ROUNDS)))
