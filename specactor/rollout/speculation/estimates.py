"""What an engine knows of its drafters and of its rounds, from what has happened so far. PURE: seconds are passed in.

One `AcceptanceModel` per drafter for its drafts alone, and one for where earlier drafts of a request's tree were wrong;
one `OnlineCosts` for seconds; `Balance`, what drafting has won and lost; and the counts for the metrics.

A round is counted once, under the drafter that leads it, or OFF. Catching up is no part of what drafting costs, and a
look no part of what plain decoding does; the balance has both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from specactor.rollout.speculation.acceptance import AcceptanceModel
from specactor.rollout.speculation.costs import CostTable, OnlineCosts
from specactor.rollout.speculation.counters import Counts
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.probing import Balance, Seen
from specactor.rollout.speculation.verification import Credit, Decision, credits_of
from specactor.rollout.speculation.windows import OFF

NEW_WEIGHTS_WEIGHT = 0.5
"""What evidence is worth after the weights of the policy, or of a drafter, have changed."""
AFTER_RATE = 0.3
"""Believed acceptance of a first token where earlier drafts were wrong, of a drafter nobody has seen. Hopeful."""


class Estimates:
    def __init__(self, drafters: Mapping[str, Drafter], *, max_window: int, table: CostTable | None = None) -> None:
        self.acceptance = {name: AcceptanceModel(max_window=max_window) for name in drafters}
        self.after = {name: AcceptanceModel(max_window=max_window, prior_rate=AFTER_RATE) for name in drafters}
        """Of a draft's own tokens, where all earlier drafts were wrong."""
        self.costs = OnlineCosts(table)
        self.balance = Balance()
        self.counts: dict[str, Counts] = {name: Counts() for name in (OFF, *drafters)}
        self._drafts_first = {name: drafter.drafts_first for name, drafter in drafters.items()}
        self._was_plain = False
        self._had_drafts = False

    def forget(self, request_id: str) -> None:
        """The request has ended. What it taught about drafters stays."""
        for model in (*self.acceptance.values(), *self.after.values()):
            model.forget(request_id)

    def policy_changed(self) -> None:
        for model in (*self.acceptance.values(), *self.after.values()):
            model.new_version(NEW_WEIGHTS_WEIGHT)
        self.balance.renewed(NEW_WEIGHTS_WEIGHT)

    def drafter_changed(self, name: str) -> None:
        self.acceptance[name].new_version(NEW_WEIGHTS_WEIGHT)

    def looked(self, request_id: str, looks: Iterable[Seen]) -> None:
        """What became of drafts that were not verified."""
        for drafter, drafted, agreed, asked, sure in looks:
            self.acceptance[drafter].observe(request_id, drafted, agreed, asked=asked, confidence=sure)

    def plain_round(self, requests: int, *, round_s: float, predicted_s: float) -> None:
        """A round on the engine's plain path. `predicted_s`: uncorrected, or 0."""
        self.counts[OFF].rested += 1
        self.counts[OFF].round(
            (), (), verify_s=round_s, draft_s=0.0, predicted_s=predicted_s * self.costs.correction.factor(OFF)
        )
        others, drafts = not self._was_plain, self._had_drafts
        self._was_plain, self._had_drafts = True, False
        self.costs.observe_plain(requests, round_s=round_s, predicted_s=predicted_s, after_another=others)
        if self.costs.table is not None:
            self.balance.rested(round_s, plain_s=self.costs.plain_s(requests), after_drafts=drafts)

    def round(
        self,
        decision: Decision,
        sequences: Sequence[DraftSequence],
        accepted: Sequence[Sequence[int]],
        *,
        round_s: float,
        is_steady: bool,
    ) -> None:
        """Another round. `accepted`: per request, the draft tokens that were. `is_steady`: its drafters had nothing to
        catch up with."""
        requests, is_drafted = len(sequences), decision.drafter != OFF
        self._was_plain, self._had_drafts = False, is_drafted
        names = [decision.drafter, *decision.beside]
        drafts = list(zip(decision.drafts, *decision.beside.values(), strict=True)) if is_drafted else []
        credits = [credits_of(of_request, right) for of_request, right in zip(drafts, accepted, strict=is_drafted)]
        self._weigh(is_drafted, requests, sum(c.accepted for own in credits for c in own), round_s)
        # A request's verify is that of the first that drafted for it.
        first = [next((k for k, credit in enumerate(own) if credit.drafted), 0) for own in credits]
        lead = [own[0] for own, k in zip(credits, first, strict=True) if k == 0]
        verify_s = max(round_s - decision.draft_s, 1e-6)
        self.counts[decision.drafter].round(
            [c.drafted for c in lead],
            [c.accepted for c in lead],
            verify_s=verify_s,
            draft_s=decision.draft_s,
            predicted_s=decision.predicted_s * self.costs.correction.factor(decision.timed_as),
        )
        is_usual = is_drafted and is_steady
        self.costs.observe(
            decision.timed_as,
            requests=requests,
            rows=requests + sum(c.drafted for own in credits for c in own),
            depth=decision.depth,
            verify_s=verify_s,
            draft_s=decision.draft_s if is_usual else 0.0,
            predicted_s=decision.predicted_s if is_usual else 0.0,
            drafted=(decision.drafter, sum(map(bool, decision.to_draft))) if decision.together else None,
        )
        for own, owner in zip(credits, first, strict=True) if decision.beside else ():
            for k, (name, credit) in enumerate(zip(names, own, strict=True)):
                if k and credit.drafted:
                    self.counts[name].beside(credit.first, credit.drafted, credit.accepted, is_first=k == owner)
        if is_drafted:
            self._verified(decision, sequences, names, drafts, credits)

    def _verified(
        self,
        decision: Decision,
        sequences: Sequence[DraftSequence],
        names: Sequence[str],
        drafts: Sequence[tuple[list[int], ...]],
        credits: Sequence[list[Credit]],
    ) -> None:
        """What the round's drafts say of their drafters' acceptance. `drafts`: per request."""
        cut = self._drafts_first[decision.drafter]  # then a short draft may only have been cut by the window
        models = [self.acceptance[name] for name in names]
        for i, sequence in enumerate(sequences):
            request_id = sequence.request_id
            for model, draft, credit in zip(models, drafts[i], credits[i], strict=True):
                asked = None if cut else max(decision.to_draft[i], len(draft))
                if draft or asked:
                    sure = model.told(request_id)
                    model.observe(request_id, len(draft), credit.agreed, asked=asked, confidence=sure)
            if decision.beside:
                self.tree_verified(request_id, zip(names, credits[i], strict=True))

    def tree_verified(self, request_id: str, credits: Iterable[tuple[str, Credit]]) -> None:
        """What a tree of several drafts says of those that come after others."""
        is_first = True
        for name, credit in credits:
            if credit.reached and credit.drafted and not is_first:
                self.after[name].observe(request_id, credit.drafted, credit.accepted)
            is_first &= credit.first + credit.drafted == 0

    def report(self) -> dict[str, Counts]:
        report, self.counts = self.counts, {name: Counts() for name in self.counts}
        return report

    def _weigh(self, is_drafted: bool, requests: int, accepted: int, round_s: float) -> None:
        if self.costs.table is None:
            return
        plain_s = self.costs.plain_s(requests)
        if is_drafted:
            self.balance.drafted(plain_s * (requests + accepted) / requests - round_s, plain_s=plain_s)
        else:
            self.balance.looked(round_s - plain_s, plain_s=plain_s)
