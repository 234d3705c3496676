"""The ways to go on with a round: one drafter for all, each request with its own, several for a request in trees.

Each way is an option with a predicted speed, and `planning.windows.choose` takes the fastest of them and of plain
decoding. So neither requests with drafters of their own (`mixing`) nor further drafts (`further`, `trees`) are ever
chosen where one drafter for all is predicted to be faster.

Invariants: where fewer than two drafters have drafts, no request is asked for its own; what an option verifies is part
of what was drafted; an option is named after a drafter, or is `PER_REQUEST` or `FASTEST`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from specactor.config import SpeculationConfig
from specactor.rollout.draft.decision import Decision
from specactor.rollout.draft.drafter import DraftSequence
from specactor.rollout.draft.further import Floats, further
from specactor.rollout.draft.methods import Methods
from specactor.rollout.draft.mixing import Mixing, reaching
from specactor.rollout.draft.options import Costs, live_costs, of_drafter, of_requests, of_trees
from specactor.rollout.draft.promises import Promises
from specactor.rollout.draft.trees import Candidates, Drafts, Merging
from specactor.rollout.planning.acceptance import AcceptanceModel
from specactor.rollout.planning.costs import CostTable
from specactor.rollout.planning.fastest_of_n import ranked
from specactor.rollout.planning.online_costs import OnlineCosts
from specactor.rollout.planning.reconfiguration import LiveCosts
from specactor.rollout.planning.windows import Choice, Option

PER_REQUEST = "per request"
"""The way in which each request has a drafter of its own."""
FASTEST = "fastest of N"
"""The way in which requests that need it have several."""

Chosen = Callable[[Sequence[int]], Drafts]
"""Windows -> what is verified."""


@dataclass(frozen=True, kw_only=True)
class Ways:
    """What was drafted for some requests, and what each way to go on would bring."""

    drafts: Drafts
    options: dict[str, Option] = field(default_factory=dict)
    chosen: dict[str, Chosen] = field(default_factory=dict)
    """Of ways that are more than one drafter's drafts."""

    def decided(self, choice: Choice, caps: Sequence[int]) -> Decision:
        """What the choice of one of them verifies; `caps`: tokens that drafters were asked for."""
        windows, kind = list(choice.windows), choice.drafter
        name = next(iter(self.drafts)) if kind in (PER_REQUEST, FASTEST) else kind
        together = name not in self.drafts
        drafts = self.drafts.get(name, [[] for _ in windows])
        decision = Decision(
            drafter=name,
            windows=windows,
            depth=max(windows if together else caps),
            drafts=[draft[:w] for draft, w in zip(drafts, windows, strict=True)],
            together=together,
            predicted_s=choice.round_s / self.options[kind].factor,
            kind=kind,
        )
        if kind in self.chosen:
            decision.take(self.chosen[kind](windows))
        return decision


class Planner:
    """Of one engine. Its costs and its drafters' acceptance are those of the speculator."""

    def __init__(
        self,
        config: SpeculationConfig,
        methods: Methods,
        acceptance: Mapping[str, AcceptanceModel],
        costs: OnlineCosts,
    ) -> None:
        self.merging = Merging(list(acceptance), max_window=config.max_window)
        self.mixing = Mixing()
        self._promises = Promises()
        self._config, self._methods, self._acceptance, self._costs = config, methods, acceptance, costs
        self._alone: dict[tuple[str, int], LiveCosts] = {}
        """Of rounds in which that drafter drafts for all, by drafter and number of requests."""
        self._alone_of: CostTable | None = None

    def ways(
        self,
        sequences: Sequence[DraftSequence],
        caps: Sequence[int],
        costs: Costs,
        drafts: Drafts,
        *,
        max_branches: int,
        several: bool = True,
    ) -> Ways:
        """`drafts`: of drafters that draft first. `several`: whether requests may have further drafts."""
        ids = [sequence.request_id for sequence in sequences]
        found = Ways(drafts=drafts)
        if self._config.merge:
            self._merged(found, ids, caps, costs, max_branches)
        for name in self._acceptance:
            if name in self._methods.there and not (self._config.merge and name in drafts):
                choice = of_drafter(name, self._acceptance[name], costs, sequences, caps, drafts.get(name))
                found.options[name] = self._option(name, choice)
        if costs is self._costs:
            self._expect(found, len(ids))
        ready = [name for name, lists in drafts.items() if any(lists)]
        goes_further = several and self._config.fastest_of > 1 and self._config.mode == "auto"
        if len(ready) > 1 and not self._config.merge and (len(ids) > 1 or goes_further):  # one alone is one drafter's
            self._mixed(found, ids, caps, costs, ready, max_branches if goes_further else 0)
        return found

    def forget(self, request_id: str) -> None:
        self.merging.forget(request_id)
        self.mixing.forget(request_id)

    def _option(self, kind: str, choice: Choice) -> Option:
        return Option(choice=choice, factor=self._costs.correction.factor(kind))

    def _expect(self, found: Ways, requests: int) -> None:
        """Of drafters elsewhere, what they usually have; asked where all requests are."""
        plain_s = self._costs.plain_s(requests)
        for name, option in found.options.items():
            if name in self._methods.drafters and self._methods.drafters[name].drafts_ahead:
                seconds = option.choice.round_s * option.factor
                gain = self._promises.promised(name, tokens=option.choice.emitted / requests, rounds=seconds / plain_s)
                found.options[name] = replace(option, usual=gain * requests / plain_s)

    def _merged(self, found: Ways, ids: Sequence[str], caps: Sequence[int], costs: Costs, max_branches: int) -> None:
        """All that was drafted for a request, in one tree."""
        trees = self.merging.candidates(ids, found.drafts, self._acceptance, max_branches=max_branches)
        if trees.drafts:
            lead = next(iter(trees.drafts))
            seconds = sum(costs.draft_s(name, len(caps))(max(caps)) for name in found.drafts)
            self._add_trees(found, lead, trees, costs, caps, seconds)

    def _add_trees(
        self, found: Ways, kind: str, trees: Candidates, costs: Costs, caps: Sequence[int], spent_s: float
    ) -> None:
        choice = of_trees(trees, costs, caps, spent_s=spent_s, max_window=self._config.max_window)
        found.options[kind] = self._option(kind, choice)
        found.chosen[kind] = trees.chosen

    def _mixed(
        self,
        found: Ways,
        ids: Sequence[str],
        caps: Sequence[int],
        costs: Costs,
        ready: Sequence[str],
        max_branches: int,
    ) -> None:
        """Each request has a drafter of its own, and perhaps further ones."""
        drafts, depth = found.drafts, max(caps)
        lengths = {name: [len(draft) for draft in drafts[name]] for name in ready}
        own = {name: reaching(self._acceptance[name].survivals(ids, covered=True), lengths[name]) for name in ready}
        # Every drafter's seconds are those of a round in which all draft that draft first.
        spent_s = max(costs.draft_s(name, len(ids))(depth) for name in (*ready, PER_REQUEST))
        live = live_costs(costs, len(ids), max_window=self._config.max_window, spent_s=spent_s)
        owners = self.mixing.owners(ids, own, live)
        row = {name: k for k, name in enumerate(ready)}
        owner_B = np.array([row.get(name, 0) for name in owners])
        reaching_BW = np.stack([own[name] for name in ready])[owner_B, np.arange(len(ids))]
        own_lengths = [lengths[name][i] if name in row else 0 for i, name in enumerate(owners)]
        choice = of_requests(reaching_BW, own_lengths, costs, spent_s=spent_s)
        found.options[PER_REQUEST] = self._option(PER_REQUEST, choice)
        found.chosen[PER_REQUEST] = lambda windows: _of_owners(drafts, ready, owners, windows)
        if max_branches:
            self._further(found, ids, caps, costs, owners, own, live, max_branches)

    def _further(
        self,
        found: Ways,
        ids: Sequence[str],
        caps: Sequence[int],
        costs: Costs,
        owners: Sequence[str],
        own: Mapping[str, Floats],
        live: LiveCosts,
        max_branches: int,
    ) -> None:
        """Algorithm 3: those that need it most first, the best method of the ladder first, while it pays."""
        after = {name: reaching(self.merging.after(name, ids), np.count_nonzero(own[name], axis=1)) for name in own}
        methods = further(
            ids,
            owners,
            found.drafts,
            own,
            after,
            ranked=self.ranked(list(own), len(ids)),
            costs=live,
            most=self._config.fastest_of,
            room=max_branches,
        )
        if all(len(of) < 2 for of in methods):
            return
        part = {
            name: [draft if name in of else [] for draft, of in zip(found.drafts[name], methods, strict=True)]
            for name in own
        }
        trees = self.merging.candidates(ids, part, self._acceptance, max_branches=max_branches)
        assert live.coupled_draft_s is not None
        spent_s = max(float(live.coupled_draft_s[0]), costs.draft_s(FASTEST, len(ids))(max(caps)))
        self._add_trees(found, FASTEST, trees, costs, caps, spent_s)

    def ranked(self, names: Sequence[str], requests: int) -> list[str]:
        """The best first, at the acceptance of each that was seen so far."""
        if self._alone_of is not self._costs.table:
            self._alone, self._alone_of = {}, self._costs.table
        costs = {name: self._costs_alone(name, requests) for name in names}
        return ranked({name: self._acceptance[name].rate for name in names}, costs)

    def _costs_alone(self, name: str, requests: int) -> LiveCosts:
        if (name, requests) not in self._alone:
            most = self._config.max_window
            self._alone[name, requests] = LiveCosts(
                plain_s=self._costs.plain_s(requests),
                verify_s=self._costs.verify_curve(requests, requests * (1 + most))[::requests],
                coupled_draft_s=np.array([self._costs.draft_s(name, requests)(w) for w in range(1, most + 1)]),
                decoupled_draft_s=None,
            )
        return self._alone[name, requests]


def _of_owners(drafts: Drafts, ready: Sequence[str], owners: Sequence[str], windows: Sequence[int]) -> Drafts:
    """Of each request's drafter, so many tokens. Drafters without any are left out."""
    out: Drafts = {}
    for name in ready:
        lists = [
            draft[:window] if owner == name else []
            for draft, owner, window in zip(drafts[name], owners, windows, strict=True)
        ]
        if any(lists):
            out[name] = lists
    return out
