"""An engine of the simulator: its requests, and how far they are. PURE. Time does not go back; tokens never exceed a
request's length. Shapes: B running requests, N all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from specactor.planning.plans import VerifierOption
from specactor.rollout.speculation.costs import MIN_RATIOS
from specactor.simulator.decide import Decider, Decision
from specactor.simulator.requests import MODES, Flags, Floats, Ints, Progress, Round

FIRST_LOOK, LAST_LOOK = 4, 1024
"""Rounds after which an engine decides anew where nothing else happens: at first and when it has changed its mind, and
later, doubled each time. (A real one decides in every round, mostly the same.)"""


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
    engine.decider.took(of, requests=requests, seconds=engine.first_round_s, rounds=int(min(rounds, MIN_RATIOS)))
