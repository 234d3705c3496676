"""Decides, round by round, what is drafted for which request, and remembers what became of it.

Invariants: only the past is used: `decide` sees what `learn` was told of earlier rounds, never the round's own outcome.
A drafter that raises costs its drafts and nothing else. Whatever is decided, tokens are the target's.

Modes: with a fixed window every request gets it. Otherwise windows are those of the highest predicted speed
(`planning.windows`), from each request's past acceptance and the measured costs of rounds; in mode auto plain decoding
is among the choices, and so is every drafter. To begin, drafting must be faster by ENTRY_MARGIN, and by more after
losses (`probing.Balance`). While decoding is plain, drafts are made now and then for the record and compared with
what is emitted, so that a drafter that has become good is noticed. In between the engine need not ask (`rest`), and
drafters hear of nothing (`drafter_set`).

Where several drafters that draft first have drafts, each request may have its own (`planner`), or with `fastest_of`
several in one tree, where that pays (`fastest_of_n`). The first of them that drafted anything leads the round.

One rank of an engine decides. A drafter that computes on all ranks together (one that does not draft first) is only
chosen by `decide`; its drafts are then made by `draft`, on every rank with the same arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from specactor.config import SpeculationConfig
from specactor.rollout import cost_file
from specactor.rollout.speculation.acceptance import AcceptanceModel
from specactor.rollout.speculation.counters import Accounts, Counts
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.drafter_set import LOOK_TRIALS, DrafterSet
from specactor.rollout.speculation.online_costs import OnlineCosts
from specactor.rollout.speculation.planner import Part, Planner
from specactor.rollout.speculation.probing import FEW, MAX_REST, Look, Looks, Rest, Seen
from specactor.rollout.speculation.verification import Credit, Decision, Drafts, credits_of
from specactor.rollout.speculation.windows import MARGIN, OFF, Choice, Option, choose
from specactor.trace import Recorder

NEW_POLICY_WEIGHT = 0.5
"""What evidence about acceptance is worth after the policy has changed."""
LOOKED_AT = 16
"""Requests that a look drafts for, of more."""
ENTRY_MARGIN = 0.05
"""By which drafting must be faster than plain decoding to begin: predictions err, and drafters have to catch up."""
MOST_FRUITLESS = 16
"""Rounds in a row without any draft, before costs are known, after which it is tried as seldom as one looks."""

_LOG = logging.getLogger(__name__)


class Speculator:
    """All draft methods of one engine."""

    def __init__(
        self,
        config: SpeculationConfig,
        drafters: Sequence[Drafter],
        *,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.drafters = {drafter.name: drafter for drafter in drafters}
        self.acceptance = {name: AcceptanceModel(max_window=config.max_window) for name in self.drafters}
        self.costs = OnlineCosts(cost_file.read(config.cost_table) if config.cost_table else None)
        self.accounts = Accounts(self.drafters, self.costs)
        self._clock = clock
        self._current = OFF
        self.drafter_set = DrafterSet(
            drafters, config, acceptance=self.acceptance, counts=lambda name: self.accounts.counts[name]
        )
        self._planner = Planner(config, self.drafter_set, self.acceptance, self.costs)
        self._looks = Looks()
        self._rest = Rest()
        self._num_looks = 0
        self._recorder = Recorder()
        self._fruitless = 0
        """Rounds in a row in which drafts were asked for and there were none, before costs were known."""
        self._is_steady = False
        """Whether the drafters have nothing to catch up with in this round, so that its times are those of others."""
        self._decision = Decision(drafter=OFF, windows=[], drafts=[])

    def open(self, sequence: DraftSequence) -> None:
        self.drafter_set.open(sequence)
        self._rest.renewed()

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:
        """`tokens` were appended to the sequence's output. While decoding is plain, drafters are told later, and of
        many tokens at once."""
        self.drafter_set.commit(sequence)
        self._saw(sequence, self._looks.over(sequence.request_id, sequence.output_ids))

    def close(self, sequence: DraftSequence) -> None:
        self._saw(sequence, self._looks.ended(sequence.request_id, sequence.output_ids))
        for acceptance in self.acceptance.values():
            acceptance.forget(sequence.request_id)
        self._planner.forget(sequence.request_id)
        self.drafter_set.close(sequence)

    def _saw(self, sequence: DraftSequence, looks: Iterable[Seen]) -> None:
        for drafter, drafted, agreed, asked, sure in looks:
            self.acceptance[drafter].observe(sequence.request_id, drafted, agreed, asked=asked, confidence=sure)

    def policy_changed(self) -> None:
        for acceptance in self.acceptance.values():
            acceptance.new_version(NEW_POLICY_WEIGHT)
        self._planner.merging.new_version(NEW_POLICY_WEIGHT)
        self.accounts.balance.renewed(NEW_POLICY_WEIGHT)
        self._rest.forget()
        self.drafter_set.policy_changed()

    def decide(self, sequences: Sequence[DraftSequence], limits: Sequence[int], *, max_branches: int = 0) -> Decision:
        """Drafts for the next round, of at most `limits[i]` tokens for request i; none where verifying would not pay.

        `max_branches`: of all trees together; with none, trees are chains.
        """
        caps = [max(0, min(limit, self.config.max_window)) for limit in limits]
        requests = len(sequences)
        known = self.config.window is None and self.costs.table is not None
        if known and not any(caps) and self._may_rest() and self._rest.over():
            self._rest.looked({}, look_s=0.0, plain_s=1.0)  # there is nothing to look at
        if (known and not any(caps)) or self._resting():
            self.drafter_set.pause()
            self._decision = self._plain(requests)
            return self._decision
        started = self._clock()
        self.drafter_set.find()
        if not self.drafter_set.there:
            self.drafter_set.pause()
            self._decision = self._plain(requests)
            return self._decision
        self.drafter_set.let_wait(self._waited_for())
        decision = self._best(sequences, caps, max_branches) if known else self._tried(sequences, caps)
        decision.draft_s = self._clock() - started
        self._decision = decision
        return decision

    @property
    def rest(self) -> int:
        """After `decide`: rounds from the next on that will be plain, whatever comes; `decide` need not be asked, and
        nothing committed, until these are over."""
        if not self.drafter_set.there:
            return self.drafter_set.plain_rounds_ahead
        if self.config.window:
            return 0
        if self.config.window is not None:
            return MAX_REST
        if self._may_rest():
            return self._rest.left
        return int(self.costs.table is None and self.costs.plain_is_next())

    def rested(self, requests: int, *, round_s: float) -> None:
        """A plain round has ended, of those that `rest` promised; its seconds."""
        if self.config.window is None or not self.drafter_set.there:
            self.drafter_set.pause()
        if self._may_rest():
            self._rest.over()
        self.drafter_set.listen(self._clock())
        self._decision = self._plain(requests)
        self.accounts.plain_round(self._decision, requests, round_s=round_s)

    def draft(self, drafter: str, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        """The drafts of a decision that left them to all ranks; those that did not decide must call it too."""
        started = self._clock()
        drafts = self.drafter_set.draft(drafter, sequences, windows)
        if self._decision.together:
            self._decision.drafts = drafts
            self._decision.draft_s += self._clock() - started
        return drafts

    def learn(self, sequences: Sequence[DraftSequence], accepted: Sequence[Sequence[int]], *, round_s: float) -> None:
        """What became of the drafts of the last `decide`: per request, the draft tokens that were accepted; and the
        seconds of the whole round."""
        decision = self._decision
        every = list(zip(decision.drafts, *decision.beside.values(), strict=True)) if decision.drafter != OFF else []
        credits = [credits_of(drafts, right) for drafts, right in zip(every, accepted, strict=bool(every))]
        self.accounts.round(decision, credits, len(sequences), round_s=round_s, is_steady=self._is_steady)
        if every:
            leader = self.drafters[decision.drafter]
            self.drafter_set.call(leader, leader.led, round_s)
            self._observe(sequences, [decision.drafter, *decision.beside], every, credits)

    def _observe(
        self,
        sequences: Sequence[DraftSequence],
        names: Sequence[str],
        every: Sequence[tuple[list[int], ...]],
        credits: Sequence[list[Credit]],
    ) -> None:
        """What the last decision's drafts say of their drafters' acceptance. `every`: per request, its drafts."""
        decision = self._decision
        cut = self.drafters[decision.drafter].drafts_first  # then a short draft may only have been cut by the window
        models = [self.acceptance[name] for name in names]
        for i, sequence in enumerate(sequences):
            for model, draft, credit in zip(models, every[i], credits[i], strict=True):
                asked = None if cut else max(decision.windows[i], len(draft))
                if draft or asked:
                    sure = model.told(sequence.request_id)
                    model.observe(sequence.request_id, len(draft), credit.agreed, asked=asked, confidence=sure)
            if decision.beside:
                self._planner.merging.learn(sequence.request_id, zip(names, credits[i], strict=True))

    def report(self) -> dict[str, Counts]:
        """Counts per drafter, and of plain rounds, since the last report."""
        return self.accounts.report()

    def record(self, recorder: Recorder) -> None:
        """Where this and the drafters write what they do when."""
        self._recorder = recorder
        for drafter in self.drafters.values():
            drafter.recorder = recorder

    def _tried(self, sequences: Sequence[DraftSequence], caps: Sequence[int]) -> Decision:
        """With the fixed window, or one that tells what rounds cost."""
        self._is_steady = not self.drafter_set.is_paused
        started = self._clock()
        self.drafter_set.resume()
        seldom, window = self._may_rest(), self.config.window
        most = (self.costs.wanted(self.config.max_window) or int(seldom)) if window is None else window
        decision = self.drafter_set.fixed(sequences, [min(cap, most) for cap in caps])
        if any(decision.drafts) or decision.together:
            self._fruitless = 0
            self._rest.forget()
        elif most:
            self._fruitless += 1
            look_s = self._clock() - started
            if seldom and not self._rest.waits(self.drafter_set.expects(), look_s=look_s):
                self._rest.looked({}, look_s=look_s, plain_s=float("inf"))
        return decision

    def _plain(self, requests: int) -> Decision:
        known = self.costs.table is not None
        return Decision(
            drafter=OFF,
            windows=[0] * requests,
            drafts=[[] for _ in range(requests)],
            predicted_s=self.costs.plain_s(requests) / self.costs.correction.factor(OFF) if known else 0.0,
        )

    def _may_rest(self) -> bool:
        """Whether plain decoding goes on until the next look."""
        may = self.costs.table is not None or self._fruitless >= MOST_FRUITLESS
        return may and self.config.window is None and self.config.mode == "auto" and self._current == OFF

    def _waited_for(self) -> Collection[str]:
        """Drafters whose drafts this round would verify. Those of others are looked at, and nobody waits for a look."""
        if self.config.window is not None or self.costs.table is None:
            return () if self._may_rest() else self.drafters
        if self._current == OFF:
            return ()
        return (self._current,) if self._current in self.drafters else self.drafters

    def _resting(self) -> bool:
        """Whether plain decoding goes on without another look."""
        return self._may_rest() and not self._rest.over()

    def _best(self, sequences: Sequence[DraftSequence], caps: list[int], max_branches: int) -> Decision:
        """The drafter and windows of the highest predicted speed."""
        requests = len(sequences)
        started = self._clock()
        seldom = requests > LOOKED_AT or self._rest.is_long
        if seldom and self._may_rest() and not self._is_promising(sequences, caps, max_branches):
            return self._plain(requests)
        self._is_steady = not self.drafter_set.is_paused
        self.drafter_set.resume()
        drafts = self.drafter_set.first(sequences, caps)
        ways = self._planner.ways(sequences, caps, self.costs, drafts, max_branches=max_branches)
        choice = self._choose(ways.options, requests)
        if choice.drafter == OFF:
            self._look_over(sequences, ways.drafts, caps, started=started, requests=requests)
            return self._plain(requests)
        self._rest.forget()
        decision = ways.decided(choice, caps)
        self._look(sequences, ways.drafts, caps, decision)
        if len(ways.drafts) > 1:
            self._settle(sequences, ways.drafts, decision, choice.reason)
        return decision

    def _settle(self, sequences: Sequence[DraftSequence], drafts: Drafts, decision: Decision, reason: str) -> None:
        """Requests that changed their drafter are counted."""
        for switch in self._planner.mixing.settle([s.request_id for s in sequences], drafts, decision):
            self.accounts.counts[switch.after].switches += switch.requests
            name = f"{switch.requests} from {switch.before} to {switch.after}"
            self._recorder.instant("rounds", name, self._clock(), why=reason)

    def _is_promising(self, sequences: Sequence[DraftSequence], caps: Sequence[int], max_branches: int) -> bool:
        """Look at some of the requests, others every time: whether drafting would pay if all were like them."""
        requests, started = len(sequences), self._clock()
        self._num_looks += not self._rest.goes_on
        sample = min(requests, LOOKED_AT)
        apart = requests // sample  # neighbours are of one group
        first = self._num_looks * (sample * apart + 1)
        which = [(first + k * apart) % requests for k in range(sample)]
        some, some_caps = [sequences[i] for i in which], [caps[i] for i in which]
        known: Drafts = {}
        if self._rest.is_long and not self._rest.goes_on:
            known = self.drafter_set.hindsight(some, some_caps)
        self.drafter_set.resume(some)
        later = self.drafter_set.first(some, some_caps, ahead=True if known else None)
        costs = Part(self.costs, sample=sample, requests=requests)
        ways = self._planner.ways(some, some_caps, costs, known | later, max_branches=max_branches, several=False)
        plain_s = self.costs.plain_s(requests) * sample / requests
        handicapped_s = plain_s / (1 + self.accounts.balance.handicap)
        choice = choose(ways.options, requests=sample, plain_s=handicapped_s, margin=ENTRY_MARGIN)
        if any(choice.windows):
            won_s = (plain_s * choice.emitted - choice.round_s * sample) * requests / sample**2
            self.accounts.balance.promised(won_s, plain_s=self.costs.plain_s(requests))
            return True
        self._look_over(some, later, some_caps, started=started, requests=requests)
        return False

    def _look_over(
        self, sequences: Sequence[DraftSequence], drafts: Drafts, caps: Sequence[int], *, started: float, requests: int
    ) -> None:
        """Verifying these drafts would not pay; or some that would are still on their way."""
        if self._rest.waits(self.drafter_set.expects(), look_s=self._clock() - started):
            return
        rates = {drafter: model.rate for drafter, model in self.acceptance.items()}
        for name in drafts if self._rest.is_long else ():
            self.acceptance[name].limit(LOOK_TRIALS)  # looks are few, so old evidence makes way
        self._look(sequences, drafts, caps)
        look_s, plain_s = self._clock() - started, self.costs.plain_s(requests)
        again = requests <= FEW and self.accounts.balance.pays_for(look_s, plain_s=plain_s)
        self._rest.looked(rates, look_s=look_s, plain_s=plain_s, again=again)

    def _choose(self, options: dict[str, Option], requests: int) -> Choice:
        # In mode coupled drafting is wanted, and plain decoding is no choice.
        is_auto = self.config.mode == "auto" or not options
        plain_s = self.costs.plain_s(requests) / (1 + self.accounts.balance.handicap) if is_auto else float("inf")
        margin = ENTRY_MARGIN if self._current == OFF else MARGIN
        choice = choose(options, requests=requests, plain_s=plain_s, current=self._current, margin=margin)
        promising = choice.drafter in options and options[choice.drafter].usual > 0
        if self.config.mode == "auto" and not any(choice.windows) and not promising:
            choice = replace(choice, drafter=OFF)  # a drafter that is asked and never verified
        if choice.drafter != self._current:
            _LOG.info("speculation: %s", choice.reason)
            self._recorder.instant("rounds", f"switch to {choice.drafter}", self._clock(), why=choice.reason)
        self._current = choice.drafter
        if choice.drafter == OFF:
            choice = replace(choice, round_s=self.costs.plain_s(requests))  # without the handicap
        self._planner.mixing.promised(choice.tokens_per_s / requests)
        return choice

    def _look(
        self, sequences: Sequence[DraftSequence], drafts: Drafts, caps: Sequence[int], decision: Decision | None = None
    ) -> None:
        """Keep what was drafted and is not verified, for comparison. `decision`: what is verified."""
        verified: Drafts = {} if decision is None else {decision.drafter: decision.drafts, **decision.beside}
        for i, (sequence, cap) in enumerate(zip(sequences, caps, strict=True)):
            if not cap or self._looks.has(sequence.request_id):
                continue
            compared = {
                name: lists[i]
                for name, lists in drafts.items()
                if (lists[i] or not self.drafters[name].drafts_ahead) and not (name in verified and verified[name][i])
            }
            if compared:
                sure = {name: self.acceptance[name].told(sequence.request_id) for name in compared}
                self._looks.keep(sequence.request_id, Look(len(sequence.output_ids), cap, compared, sure))
