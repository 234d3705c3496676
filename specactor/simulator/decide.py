"""What an engine of the simulator decides, by the functions that a real one calls. PURE. Invariants: `decide` uses what
`saw` and `took` were given before; only in auto requests leave the rollout's plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from specactor.errors import PlanError
from specactor.planning.plans import Candidates, Cluster, Mode, RolloutPlan, VerifierOption
from specactor.planning.search import search
from specactor.rollout.speculation.acceptance import AcceptanceModel
from specactor.rollout.speculation.costs import OnlineCosts
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.planner import of_drafter
from specactor.rollout.speculation.windows import OFF as NO_DRAFTER
from specactor.rollout.speculation.windows import Choice, choose
from specactor.simulator.requests import COUPLED, DECOUPLED, MODES, OFF, Ints, Remote, round_of

SimulatedMode = Literal["off", "coupled", "decoupled", "auto"]
AHEAD = "decoupled"  # what the plan of requests drafted for elsewhere is called among the choices


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
