"""What an engine knows of its drafters and rounds. PURE: seconds are passed in.

A round counts once, under the drafter that leads it, or OFF. Drafting is timed without bursts of catching up, plain
decoding without looks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from specactor.rollout.speculation.acceptance import AcceptanceModel
from specactor.rollout.speculation.costs import CostTable, OnlineCosts
from specactor.rollout.speculation.counters import Counts
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.probing import Seen
from specactor.rollout.speculation.verification import Credit, Decision, common, credits_of
from specactor.rollout.speculation.windows import OFF


class Reading:
    """What a drafter reads of new texts before it drafts for them. A burst is excused; texts that come all the time
    count, until they no longer come."""

    # A draft model reads 4096 tokens in a round, in 256 a full KV pool of a million: no burst has more.
    _MOST = 256

    def __init__(self) -> None:
        self.goes_on = False
        self._rounds = 0  # with new texts, less those without, 0.._MOST
        self._seconds, self._ready = 0.0, 1.0

    @property
    def seconds(self) -> float:
        """Return what a round's reading takes on average."""
        return self._seconds if self.goes_on else 0.0

    @property
    def ready(self) -> float:
        """Return the share of requests that have drafts meanwhile."""
        return self._ready if self.goes_on else 1.0

    def round(self, comes: bool) -> None:
        """Count a round, in which new texts came or not."""
        self._rounds += 1 if comes else -1
        self.goes_on = self._rounds > 0 if self.goes_on else self._rounds >= self._MOST
        self._rounds = min(max(0, self._rounds), self._MOST)

    def drafted(self, *, seconds: float, ready: float) -> None:
        """Note a round of the drafter, in the averages of its last ones."""
        self._seconds += (seconds - self._seconds) / 32
        self._ready += (ready - self._ready) / 32


class Estimates:
    def __init__(self, drafters: Mapping[str, Drafter], *, max_window: int, table: CostTable | None = None) -> None:
        self.acceptance = {name: AcceptanceModel(max_window=max_window) for name in drafters}
        self.after = {name: AcceptanceModel(max_window=max_window, prior_rate=0.3) for name in drafters}
        """Of a draft's own tokens in a tree, where all earlier drafts were wrong. The prior is hopeful."""
        self.costs = OnlineCosts(table)
        self.counts: dict[str, Counts] = {name: Counts() for name in (OFF, *drafters)}
        self.reading = {name: Reading() for name in drafters}
        self._drafts_first = {name: drafter.drafts_first for name, drafter in drafters.items()}
        self._was_plain = False

    def forget(self, request_id: str) -> None:
        for model in (*self.acceptance.values(), *self.after.values()):
            model.forget(request_id)

    def policy_changed(self) -> None:
        for model in (*self.acceptance.values(), *self.after.values()):
            model.new_version()

    def looked(self, looks: Mapping[str, Sequence[Seen]]) -> None:
        for name, seen in looks.items():
            ids, drafted, agreed, asked, sure = zip(*seen, strict=True)
            self.acceptance[name].observe_all(ids, drafted, agreed, asked=asked, sure=sure)

    def plain_round(self, requests: int, *, round_s: float, predicted_s: float) -> None:
        """Count a round on the engine's plain path."""
        self.counts[OFF].rested += 1
        self.counts[OFF].round(
            (), (), verify_s=round_s, draft_s=0.0, predicted_s=predicted_s * self.costs.correction.factor(OFF)
        )
        others, self._was_plain = not self._was_plain, True
        self.costs.observe_plain(requests, round_s=round_s, predicted_s=predicted_s, after_another=others)

    def round(
        self,
        decision: Decision,
        sequences: Sequence[DraftSequence],
        accepted: Sequence[Sequence[int]],
        *,
        round_s: float,
        is_steady: bool,
    ) -> None:
        """Count another round. `is_steady`: no drafter had a burst to catch up with."""
        requests, is_drafted = len(sequences), decision.drafter != OFF
        self._was_plain = False
        if decision.beside:
            drafted, right, total_drafted = self._tree_round(decision, sequences, accepted)
        else:
            drafted = [len(draft) for draft in decision.drafts] if is_drafted else []
            right = [
                len(tokens) if draft[: len(tokens)] == tokens else common(draft, tokens)
                for draft, tokens in zip(decision.drafts, accepted, strict=True)
                if is_drafted
            ]
            total_drafted = sum(drafted)
            if is_drafted:
                self._verified(decision.drafter, decision, sequences, drafted, right)
        verify_s = max(round_s - decision.draft_s, 1e-6)
        self.counts[decision.drafter].round(
            drafted,
            right,
            verify_s=verify_s,
            draft_s=decision.draft_s,
            predicted_s=decision.predicted_s * self.costs.correction.factor(decision.timed_as),
        )
        is_usual = is_drafted and is_steady
        self.costs.observe(
            decision.timed_as,
            requests=requests,
            rows=requests + total_drafted,
            depth=decision.depth,
            verify_s=verify_s,
            draft_s=decision.draft_s if is_usual else 0.0,
            predicted_s=decision.predicted_s if is_usual else 0.0,
            drafted=(decision.drafter, sum(map(bool, decision.to_draft))) if decision.together else None,
        )

    def _tree_round(
        self, decision: Decision, sequences: Sequence[DraftSequence], accepted: Sequence[Sequence[int]]
    ) -> tuple[list[int], list[int], int]:
        """Count a round of several drafters. Returns what the leader drafted, and had accepted, for its own requests,
        and all drafters' total."""
        names = [decision.drafter, *decision.beside]
        drafts = list(zip(decision.drafts, *decision.beside.values(), strict=True))
        credits = [credits_of(of_request, right) for of_request, right in zip(drafts, accepted, strict=True)]
        # A request's verify is that of the first that drafted for it.
        first = [next((k for k, credit in enumerate(own) if credit.drafted), 0) for own in credits]
        for sequence, own, owner in zip(sequences, credits, first, strict=True):
            for k, (name, credit) in enumerate(zip(names, own, strict=True)):
                if k and credit.drafted:
                    self.counts[name].beside(credit.first, credit.drafted, credit.accepted, is_first=k == owner)
            self.tree_verified(sequence.request_id, zip(names, own, strict=True))
        for k, name in enumerate(names):
            drafted, agreed = [len(of_request[k]) for of_request in drafts], [own[k].agreed for own in credits]
            self._verified(name, decision, sequences, drafted, agreed)
        lead = [own[0] for own, k in zip(credits, first, strict=True) if k == 0]
        total = sum(credit.drafted for own in credits for credit in own)
        return [c.drafted for c in lead], [c.accepted for c in lead], total

    def _verified(
        self,
        name: str,
        decision: Decision,
        sequences: Sequence[DraftSequence],
        drafted: Sequence[int],
        agreed: Sequence[int],
    ) -> None:
        # A short draft of one that drafts first may only have been cut by the window.
        asked = None if self._drafts_first[decision.drafter] else [*map(max, decision.to_draft, drafted)]
        self.acceptance[name].observe_all([s.request_id for s in sequences], drafted, agreed, asked=asked)

    def tree_verified(self, request_id: str, credits: Iterable[tuple[str, Credit]]) -> None:
        """Learn from a tree how drafts do that come after others."""
        is_first = True
        for name, credit in credits:
            if credit.reached and credit.drafted and not is_first:
                self.after[name].observe(request_id, credit.drafted, credit.accepted)
            is_first &= credit.first + credit.drafted == 0

    def report(self) -> dict[str, Counts]:
        report, self.counts = self.counts, {name: Counts() for name in self.counts}
        return report
