"""Decides, round by round, what is drafted for which request, and learns from it, on one rank of an engine.

Invariants: `decide` uses earlier rounds alone; whatever is decided, or goes wrong in a drafter, tokens are the
target's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from specactor.config import SpeculationConfig
from specactor.rollout.speculation.costs import CostTable, OnlineCosts
from specactor.rollout.speculation.counters import Counts
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.drafter_set import DrafterSet
from specactor.rollout.speculation.estimates import Estimates
from specactor.rollout.speculation.planner import Planner
from specactor.rollout.speculation.probing import MAX_REST, BackOff, Look, Looks
from specactor.rollout.speculation.verification import Decision, Drafts
from specactor.rollout.speculation.windows import OFF
from specactor.trace import Recorder

LOOKED_AT = 16  # requests that drafters which draft ahead hear of for a look: each is work for them as long as it runs

_LOG = logging.getLogger(__name__)


class Speculator:
    def __init__(
        self,
        config: SpeculationConfig,
        drafters: Sequence[Drafter],
        *,
        clock: Callable[[], float],
        decides: bool = True,
    ) -> None:
        """Args: decides: whether this rank does; others call neither `decide` nor `learn`."""
        self.config = config
        self.drafters = {drafter.name: drafter for drafter in drafters}
        table = CostTable.read(config.cost_table) if config.cost_table else None
        self.estimates = Estimates(self.drafters, max_window=config.max_window, table=table)
        self.drafter_set = DrafterSet(drafters, config, self.estimates, decides=decides)
        self.planner = Planner(config, self.drafter_set, self.estimates)
        self._clock = clock
        self._looks = Looks()
        self._back_off = BackOff()
        self.recorder = Recorder()
        self._fruitless = 0  # rounds in a row that asked for drafts and had none, before costs were known
        self._is_behind = False  # whether drafters were not told of the last round
        self._is_steady = False
        """Whether drafters have nothing to catch up with, so that the round's seconds are usual ones."""
        self._decision = Decision(drafter=OFF, windows=[], drafts=[])
        self._came = False  # whether requests came since the last round
        self._counted = OFF  # the drafter whose reading of this round is counted

    @property
    def costs(self) -> OnlineCosts:
        return self.estimates.costs

    def open(self, sequence: DraftSequence) -> None:
        self.drafter_set.open(sequence)
        self._came = True
        self._back_off.requests_came()

    def close(self, sequence: DraftSequence) -> None:
        self.estimates.looked(self._looks.ended(sequence.request_id))
        self.estimates.forget(sequence.request_id)
        self.planner.owners.forget(sequence.request_id)
        self.drafter_set.close(sequence)

    def policy_changed(self) -> None:
        self.estimates.policy_changed()
        self._back_off.restart()
        self.drafter_set.policy_changed()

    def decide(self, sequences: Sequence[DraftSequence], limits: Sequence[int], *, max_branches: int = 0) -> Decision:
        """Draft at most `limits[i]` tokens for request i; none where verifying would not pay. `max_branches`: of all
        trees; 0: chains."""
        caps = [max(0, min(limit, self.config.largest_window)) for limit in limits]
        started = self._clock()
        self.estimates.looked(self._looks.over())
        if not self._asks_drafters(caps):
            self._is_behind = True
            self._decision = self._plain(len(sequences))
            return self._decision
        if self._chooses_by_cost:
            decision = self._by_cost(sequences, caps, max_branches)
        else:
            decision = self._by_turns(sequences, caps)
        decision.draft_s = self._clock() - started
        self._decision = decision
        return decision

    def _asks_drafters(self, caps: Sequence[int]) -> bool:
        """Count the round, and find drafters. Returns whether any is asked in it."""
        if self._chooses_by_cost and not any(caps):
            if self._may_rest() and self._back_off.count_round(len(caps)):
                self._back_off.looked(look_s=0.0, plain_s=1.0)  # there is nothing to look at
            return False
        if self._may_rest() and not self._back_off.count_round(len(caps)):
            return False
        self.drafter_set.find()
        verified = self._to_verify()
        for name, drafter in self.drafters.items():
            drafter.is_verified = name in verified
        return bool(self.drafter_set.there)

    @property
    def _chooses(self) -> bool:
        """Whether costs decide anything; with a fixed window, which drafter drafts."""
        if self.config.window is None:
            return True
        return self.config.mode == "auto" and self.config.window > 0 and len(self.drafters) > 1

    @property
    def _chooses_by_cost(self) -> bool:
        return self._chooses and self.costs.table is not None

    @property
    def plain_rounds_ahead(self) -> int:
        """Return how many rounds, from the next on, will be plain whatever comes; until then `decide` and commits can
        wait."""
        if not self.drafter_set.there:
            return self.drafter_set.plain_rounds_ahead
        if self.config.window:
            return 0
        if self.config.window is not None:
            return MAX_REST
        if self._may_rest():
            return self._back_off.rounds_left
        return int(self.costs.table is None and self.costs.plain_is_next())

    def on_plain_round(self, requests: int, *, round_s: float) -> None:
        """Note a plain round that `plain_rounds_ahead` promised, and its seconds."""
        if self.config.window is None or not self.drafter_set.there:
            self._is_behind = True
        if self._may_rest():
            self._back_off.count_round(requests)
        self._count_arrivals()
        self._decision = self._plain(requests)
        self.estimates.plain_round(requests, round_s=round_s, predicted_s=self._decision.predicted_s)

    def draft(self, drafter: str, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        """Draft what a decision left to all ranks together, which must all call it alike."""
        started = self._clock()
        self.drafter_set.tell(sequences)
        drafts = self.drafter_set.draft(drafter, sequences, windows)
        if self._decision.together:
            read_up = self.drafter_set.read_up
            self._is_steady &= not read_up
            self._decision.drafts = drafts
            self._decision.to_draft = [
                0 if i in read_up and not drafts[i] else window for i, window in enumerate(windows)
            ]
            draft_s = self._clock() - started
            self._decision.draft_s += draft_s
            self._count_reading(drafter, windows, draft_s=draft_s, reads=bool(read_up))
        return drafts

    def _count_reading(self, drafter: str, windows: Sequence[int], *, draft_s: float, reads: bool) -> None:
        asked, ready = sum(map(bool, windows)), sum(map(bool, self._decision.to_draft))
        reading, self._counted = self.estimates.reading[drafter], drafter
        reading.round(reads)
        if self.costs.table is not None and asked:
            usual_s = self.costs.draft_s(drafter, asked)(max(windows))
            reading.drafted(seconds=max(0.0, draft_s - usual_s) if reads else 0.0, ready=ready / asked)

    def _count_arrivals(self) -> None:
        # What others than the one that drafted would have read is known by the requests that came.
        for name, reading in self.estimates.reading.items():
            if name != self._counted:
                reading.round(self._came)
        self._came, self._counted = False, OFF

    def learn(self, sequences: Sequence[DraftSequence], accepted: Sequence[Sequence[int]], *, round_s: float) -> None:
        """Learn from the last `decide`: accepted tokens per request, seconds of the whole round."""
        decision = self._decision
        self._count_arrivals()
        self.estimates.round(decision, sequences, accepted, round_s=round_s, is_steady=self._is_steady)
        if any(accepted):
            self._back_off.paid()

    def report(self) -> dict[str, Counts]:
        """Return counts per drafter, and of plain rounds, since the last report."""
        self.drafter_set.note_figures()
        return self.estimates.report()

    def _by_turns(self, sequences: Sequence[DraftSequence], caps: Sequence[int]) -> Decision:
        """Draft with a fixed window, or, while costs are unknown, with windows and drafters in turns."""
        started = self._clock()
        self._tell(sequences)
        seldom, most, turn = self._may_rest(), self.config.window or 0, 0
        if self._chooses:
            most = self.costs.wanted(self.config.largest_window) or int(seldom)
            # Of draft models one drafts in a round: another is not seen unless it has its turn.
            turn = self.costs.turn
        decision = self.drafter_set.fixed(sequences, [min(cap, most) for cap in caps], turn=turn)
        if any(decision.drafts) or decision.together:
            self._fruitless = 0
            self._back_off.restart()
        elif most:
            self._fruitless += 1
            look_s = self._clock() - started
            if seldom and not self._back_off.waits(self.drafter_set.expects(), look_s=look_s):
                self._back_off.looked(look_s=look_s, plain_s=float("inf"))
        return decision

    def _tell(self, sequences: Sequence[DraftSequence]) -> None:
        self._is_steady, self._is_behind = not self._is_behind, False
        self.drafter_set.tell(sequences)

    def _plain(self, requests: int) -> Decision:
        known = self.costs.table is not None
        return Decision(
            drafter=OFF,
            windows=[0] * requests,
            drafts=[[] for _ in range(requests)],
            predicted_s=self.costs.plain_s(requests) / self.costs.correction.factor(OFF) if known else 0.0,
        )

    def _may_rest(self) -> bool:
        """Return whether decoding is plain, so that drafters are asked only now and then."""
        # Without any draft costs stay unknown.
        may = self.costs.table is not None or self._fruitless >= 16
        return may and self.planner.may_stop and self.planner.current == OFF

    def _to_verify(self) -> Collection[str]:
        """Return the drafters whose drafts this round would verify, not look at."""
        if not self._chooses_by_cost:
            return () if self._may_rest() else self.drafters
        if self.planner.current == OFF:
            return ()
        return (self.planner.current,) if self.planner.current in self.drafters else self.drafters

    def _by_cost(self, sequences: Sequence[DraftSequence], caps: list[int], max_branches: int) -> Decision:
        requests, started = len(sequences), self._clock()
        if self._may_rest() and self._back_off.is_long and not self._back_off.goes_on:
            self.drafter_set.hindsight(sequences, caps)
        some = LOOKED_AT if self._may_rest() else requests
        self._tell(sequences[:some])
        drafts = self.drafter_set.first(sequences, caps, ahead=some)
        # Would drafting pay if the others were like those that are looked at? These have no drafts yet.
        sampled = [lists for lists in drafts.values() if len(lists) < requests]
        for lists in sampled:
            lists += [lists[i % some][:cap] for i, cap in enumerate(caps[some:])]
        options = self.planner.options(sequences, caps, drafts, max_branches=0 if sampled else max_branches)
        before, choice = self.planner.current, self.planner.choose(options, requests)
        for lists in sampled:
            lists[some:] = [[] for _ in caps[some:]]
        if choice.drafter != before:
            _LOG.info("speculation: %s", choice.reason)
            self.recorder.instant("rounds", f"switch to {choice.drafter}", self._clock(), why=choice.reason)
        if choice.drafter == OFF:
            self._look_over(sequences, drafts, caps, started=started)
            return self._plain(requests)
        self._back_off.restart()
        if some < requests:
            self.drafter_set.tell(sequences)
        decision = self.planner.decision(choice, drafts, caps)
        self._look(sequences, drafts, caps, decision)
        if len(self.drafters) > 1:
            self._settle(sequences, drafts, decision, choice.reason)
        return decision

    def _settle(self, sequences: Sequence[DraftSequence], drafts: Drafts, decision: Decision, reason: str) -> None:
        changed = self.planner.owners.settle([s.request_id for s in sequences], drafts, decision)
        for (before, after), requests in changed.items():
            self.estimates.counts[after].switches += requests
            self.recorder.instant("rounds", f"{requests} from {before} to {after}", self._clock(), why=reason)

    def _look_over(
        self, sequences: Sequence[DraftSequence], drafts: Drafts, caps: Sequence[int], *, started: float
    ) -> None:
        if self._back_off.waits(self.drafter_set.expects(), look_s=self._clock() - started):
            return
        for name in drafts if self._back_off.is_long else ():
            self.estimates.acceptance[name].limit()  # looks are few, so old evidence makes way
        self._look(sequences, drafts, caps)
        requests, look_s = len(sequences), self._clock() - started
        self._back_off.looked(look_s=look_s, plain_s=self.costs.plain_s(requests), requests=requests)

    def _look(
        self, sequences: Sequence[DraftSequence], drafts: Drafts, caps: Sequence[int], decision: Decision | None = None
    ) -> None:
        verified: Drafts = {} if decision is None else {decision.drafter: decision.drafts, **decision.beside}
        free = [i for i, s in enumerate(sequences) if s.request_id not in self._looks.pending]
        for name, lists in drafts.items():
            told, done = self.estimates.acceptance[name].told, verified.get(name)
            for i in free:
                if lists[i] and not (done and done[i]):
                    sequence = sequences[i]
                    look = Look(sequence, len(sequence.output_ids), caps[i], lists[i], told(sequence.request_id))
                    self._looks.keep(name, look)
