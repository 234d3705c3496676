"""What rounds took and brought: counts for the metrics, costs for the next choice, and the balance of both.

PURE: seconds are passed in.

Invariants: a round is counted once, under the drafter that leads it, or OFF. Catching up is no part of what drafting
costs, and a look no part of what plain decoding does; the balance has both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specactor.rollout.draft.balance import Balance
from specactor.rollout.draft.counts import Counts
from specactor.rollout.draft.decision import Decision
from specactor.rollout.draft.verification import Credit
from specactor.rollout.planning.online_costs import OnlineCosts
from specactor.rollout.planning.windows import OFF


class Accounts:
    """Of one engine."""

    def __init__(self, drafters: Iterable[str], costs: OnlineCosts) -> None:
        self.counts: dict[str, Counts] = {name: Counts() for name in (OFF, *drafters)}
        self.balance = Balance()
        self._costs = costs
        self._was_plain = False
        """Whether the last round was on the engine's plain path."""
        self._had_drafts = False
        """Whether the last round had drafts."""

    def plain_round(self, decision: Decision, requests: int, *, round_s: float) -> None:
        """A round on the engine's plain path."""
        self.counts[OFF].rested += 1
        self._count(decision, (), (), verify_s=round_s)
        others, drafts = not self._was_plain, self._had_drafts
        self._was_plain, self._had_drafts = True, False
        self._costs.observe_plain(requests, round_s=round_s, predicted_s=decision.predicted_s, after_another=others)
        if self._costs.table is not None:
            self.balance.rested(round_s, plain_s=self._costs.plain_s(requests), after_drafts=drafts)

    def round(
        self, decision: Decision, credits: Sequence[Sequence[Credit]], requests: int, *, round_s: float, is_steady: bool
    ) -> None:
        """Another round. `credits`: per request, of each drafter with drafts in the round, who leads first; none of
        plain decoding. `is_steady`: its drafters had nothing to catch up with."""
        self._was_plain, self._had_drafts = False, decision.drafter != OFF
        names = [decision.drafter, *decision.beside]
        drafted = sum(credit.drafted for own in credits for credit in own)
        accepted = sum(credit.accepted for own in credits for credit in own)
        self._weigh(decision, requests, requests + accepted, round_s)
        first = [next((k for k, credit in enumerate(own) if credit.drafted), 0) for own in credits]
        lead = [own[0] for own, k in zip(credits, first, strict=True) if k == 0]
        verify_s = max(round_s - decision.draft_s, 1e-6)
        self._count(decision, [c.drafted for c in lead], [c.accepted for c in lead], verify_s=verify_s)
        is_usual = decision.drafter != OFF and is_steady
        self._costs.observe(
            decision.timed_as,
            requests=requests,
            rows=requests + drafted,
            depth=decision.depth,
            verify_s=verify_s,
            draft_s=decision.draft_s if is_usual else 0.0,
            predicted_s=decision.predicted_s if is_usual else 0.0,
        )
        for own, owner in zip(credits, first, strict=True) if decision.beside else ():
            for k, (name, credit) in enumerate(zip(names, own, strict=True)):
                if k and credit.drafted:
                    self.counts[name].beside(credit.first, credit.drafted, credit.accepted, is_first=k == owner)

    def report(self) -> dict[str, Counts]:
        """Counts per drafter, and of plain rounds, since the last report."""
        report, self.counts = self.counts, {name: Counts() for name in self.counts}
        return report

    def _weigh(self, decision: Decision, requests: int, emitted: int, round_s: float) -> None:
        """What the round won or lost."""
        if self._costs.table is None:
            return
        plain_s = self._costs.plain_s(requests)
        if decision.drafter == OFF:
            self.balance.looked(round_s - plain_s, plain_s=plain_s)
        else:
            self.balance.drafted(plain_s * emitted / requests - round_s, plain_s=plain_s)

    def _count(self, decision: Decision, drafted: Sequence[int], accepted: Sequence[int], *, verify_s: float) -> None:
        """Args: of the drafter that leads, per request."""
        predicted_s = decision.predicted_s * self._costs.correction.factor(decision.timed_as)
        self.counts[decision.drafter].round(
            drafted, accepted, verify_s=verify_s, draft_s=decision.draft_s, predicted_s=predicted_s
        )
