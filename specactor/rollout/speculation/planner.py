"""The options that a round has: one drafter for all, each request with its own, or several for a request in trees.

Invariants: an option verifies part of what was drafted, or what one drafter is still to draft; it is named after a
drafter, begins with `PER_REQUEST`, or is `FASTEST`. A request stays with its drafter until another promises more by
`MARGIN`; that another stands in where it has no draft is no switch. Only the past is used.

Shape legend: B requests, W windows 1..max_window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from specactor.config import SpeculationConfig
from specactor.rollout.speculation.acceptance import AcceptanceModel, Floats
from specactor.rollout.speculation.costs import OnlineCosts
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.drafter_set import DrafterSet
from specactor.rollout.speculation.estimates import Estimates
from specactor.rollout.speculation.fastest_of_n import candidates, further
from specactor.rollout.speculation.verification import Decision, Drafts
from specactor.rollout.speculation.windows import CHANGE_MARGIN, OFF, Choice, best_windows, choose, padded, whole_drafts

MARGIN = 0.1
"""Tokens per round by which another drafter must promise more before a request changes; a share while there is no
pace."""
USUAL_ROUNDS = 8
"""Rounds over which is averaged what drafters elsewhere promise: one that stopped is left within six times as many."""
PER_REQUEST = "per request"  # name of the option in which each request has its own drafter
FASTEST = "fastest of N"  # name of the option in which some requests have several


class Planner:
    def __init__(self, config: SpeculationConfig, drafter_set: DrafterSet, estimates: Estimates) -> None:
        self.owners = Owners()
        self.current = OFF
        self._usual: dict[str, tuple[float, float]] = {}
        """Average tokens per request and the plain rounds that they take, by drafter elsewhere."""
        self._config, self._drafter_set, self._estimates = config, drafter_set, estimates
        self._costs, self._acceptance = estimates.costs, estimates.acceptance
        self._windows = best_windows if config.window is None else whole_drafts
        # In modes coupled and decoupled, and with a fixed window, drafting is wanted.
        self.may_stop = config.mode == "auto" and config.window is None

    def options(
        self, sequences: Sequence[DraftSequence], caps: Sequence[int], drafts: Drafts, *, max_branches: int = 0
    ) -> dict[str, Choice]:
        requests = len(sequences)
        plain_s = self._costs.plain_s(requests)
        found: dict[str, Choice] = {}
        for name, model in self._acceptance.items():
            if name not in self._drafter_set.there:
                continue
            reading = self._estimates.reading[name]
            choice = of_drafter(
                name, model, self._costs, sequences, caps, drafts.get(name), windows=self._windows, ready=reading.ready
            ).corrected(self._costs.correction.factor(name), reading.seconds)
            if self._drafter_set.drafters[name].drafts_ahead:
                gain = self.usual_gain(name, tokens=choice.emitted / requests, rounds=choice.round_s / plain_s)
                choice = replace(choice, usual=gain * requests / plain_s)
            found[name] = choice
        ready = [name for name, lists in drafts.items() if any(lists)]
        later = [name for name in found if not self._drafter_set.drafters[name].drafts_first] if requests > 1 else []
        goes_further = self._config.fastest_of > 1 and self.may_stop
        if ready and len(ready + later) > 1 and (requests > 1 or goes_further):  # one alone is one drafter's
            ids = [sequence.request_id for sequence in sequences]
            found |= self._mixed(ids, caps, drafts, ready, later, max_branches if goes_further else 0)
        return found

    def choose(self, options: Mapping[str, Choice], requests: int) -> Choice:
        """Return the fastest option, or plain decoding; to begin, drafting must be 5 % faster."""
        plain_s = self._costs.plain_s(requests) if self.may_stop or not options else float("inf")
        # To begin takes more: predictions err, and drafters have to catch up.
        margin = 0.05 if self.current == OFF else CHANGE_MARGIN
        choice = choose(options, requests=requests, plain_s=plain_s, current=self.current, margin=margin)
        if self.may_stop and not any(choice.windows) and not choice.usual:
            choice = replace(choice, drafter=OFF)  # a drafter that is asked and never verified
        self.current = choice.drafter
        self.owners.promised(choice.tokens_per_s / requests)
        return choice

    def decision(self, choice: Choice, drafts: Drafts, caps: Sequence[int]) -> Decision:
        """Return what `choice`, one of the options, verifies; drafters were asked for `caps` tokens."""
        windows, kind = list(choice.windows), choice.drafter
        decision = Decision(
            drafter=kind if choice.verified is None else next(iter(drafts)),
            windows=windows,
            depth=max(caps),
            drafts=[draft[:w] for draft, w in zip(drafts.get(kind, [[]] * len(windows)), windows, strict=True)],
            predicted_s=choice.predicted_s,
            kind=kind,
        )
        if choice.verified is not None:
            decision.take(choice.verified(windows))
        if not self._drafter_set.drafters[decision.drafter].drafts_first:
            others = decision.beside.values()
            decision.to_draft = [0 if any(lists[i] for lists in others) else w for i, w in enumerate(windows)]
            decision.depth = max(decision.to_draft)
        return decision

    def usual_gain(self, drafter: str, *, tokens: float, rounds: float) -> float:
        """Note a round's tokens per request and its seconds, in plain rounds. Returns the usual speed-up.

        After a rejection a request has no drafts for a round or two, for which alone plain decoding looks best.
        """
        # Of averages, so that quick rounds without drafts weigh less than long ones.
        mean_tokens, mean_rounds = self._usual.get(drafter, (tokens, rounds))
        mean_tokens += (tokens - mean_tokens) / USUAL_ROUNDS
        mean_rounds += (rounds - mean_rounds) / USUAL_ROUNDS
        self._usual[drafter] = mean_tokens, mean_rounds
        return mean_tokens / mean_rounds

    def _mixed(
        self,
        ids: Sequence[str],
        caps: Sequence[int],
        drafts: Drafts,
        ready: Sequence[str],
        later: Sequence[str],
        max_branches: int,
    ) -> dict[str, Choice]:
        """Return the options in which requests have drafters of their own.

        `ready`: drafters whose drafts are there; `later`: those that draft once windows are chosen.
        """
        requests, depth, most, costs = len(ids), max(caps), self._config.max_window, self._costs
        lengths = {name: [len(draft) for draft in drafts[name]] for name in ready}
        alone = {name: self._acceptance[name].survivals(ids, covered=True) for name in ready}
        own = {name: reaching(table, lengths[name]) for name, table in alone.items()}
        # Every drafter's seconds are those of a round in which all draft that draft first.
        spent_s = max(costs.draft_s(name, requests)(depth) for name in (*ready, PER_REQUEST))
        verify_W = costs.verify_curve(requests, requests * (1 + most))[::requests][1:]
        seconds = dict.fromkeys(own, verify_W + spent_s)
        found: dict[str, Choice] = {}
        for name in later:
            later_s = costs.draft_s(name, requests)
            draft_W = np.array([max(spent_s, later_s(window)) for window in range(1, most + 1)])
            ready_share = self._estimates.reading[name].ready
            survival_BW = reaching(self._acceptance[name].survivals(ids, covered=False) * ready_share, caps)
            both, reach = {**own, name: survival_BW}, {**lengths, name: list(caps)}
            owners = self.owners.of(ids, both, {**seconds, name: verify_W + draft_W})
            if 0 < owners.count(name) < requests:  # one drafter for all is an option of its own
                kind = f"{PER_REQUEST} with {name}"
                found[kind] = self._per_request(kind, owners, both, drafts, reach, spent_s, late=name)
        if len(ready) < 2:
            return found
        owners = self.owners.of(ids, own, seconds)
        found[PER_REQUEST] = self._per_request(PER_REQUEST, owners, own, drafts, lengths, spent_s)
        trees = self._trees(ids, drafts, owners, alone, own, max_branches) if max_branches else None
        if trees is not None:
            spent_s = max(spent_s, costs.draft_s(FASTEST, requests)(depth))
            of_trees, chosen = trees
            survival_BW, tree_lengths = padded(of_trees, most)
            verify_N1 = costs.verify_curve(requests, requests * (1 + most))
            choice = best_windows(survival_BW, tree_lengths, verify_N1=verify_N1, draft_s=lambda depth: spent_s)
            found[FASTEST] = replace(choice.corrected(costs.correction.factor(FASTEST)), verified=chosen)
        return found

    def _per_request(
        self,
        kind: str,
        owners: Sequence[str],
        survivals: Mapping[str, Floats],
        drafts: Drafts,
        lengths: Mapping[str, Sequence[int]],
        spent_s: float,
        *,
        late: str = "",
    ) -> Choice:
        """Return the option in which requests have the drafters `owners`.

        Args:
            survivals: by drafter [B][W].
            lengths: of drafts, at most, by drafter and request.
            spent_s: of the drafts that are there.
            late: the drafter that is still to draft, for its own requests.
        """
        requests = len(owners)
        row = {name: k for k, name in enumerate(survivals)}
        owner_B = np.array([row.get(name, 0) for name in owners])
        survival_BW = np.stack([*survivals.values()])[owner_B, np.arange(requests)]
        own_lengths = [lengths[name][i] if name in row else 0 for i, name in enumerate(owners)]
        later_s = self._costs.draft_s(late, owners.count(late)) if late else lambda depth: 0.0
        choice = self._windows(
            survival_BW,
            own_lengths,
            verify_N1=self._costs.verify_curve(requests, requests * (1 + survival_BW.shape[1])),
            draft_s=lambda depth: max(spent_s, later_s(depth)),
            drafted=[name != late for name in owners],
        )
        reading_s = self._estimates.reading[late].seconds if late else 0.0
        choice = choice.corrected(self._costs.correction.factor(kind), reading_s)
        return replace(choice, verified=partial(_of_owners, drafts, owners, late))

    def _trees(
        self,
        ids: Sequence[str],
        drafts: Drafts,
        owners: Sequence[str],
        alone: Mapping[str, Floats],
        own: Mapping[str, Floats],
        max_branches: int,
    ) -> tuple[list[list[float]], Callable[[Sequence[int]], Drafts]] | None:
        """Return `candidates` of all requests; None where no request gets a further method."""
        # Algorithm 3. Drafts that come first cost about the same, so the ladder goes by acceptance.
        ladder = sorted(own, key=lambda name: (-self._acceptance[name].rate, name))
        methods = further(owners, drafts, own, ranked=ladder, most=self._config.fastest_of)
        if all(len(of_request) < 2 for of_request in methods):
            return None
        taken = {
            name: [d if name in of_request else [] for d, of_request in zip(drafts[name], methods, strict=True)]
            for name in ladder
        }
        after = {name: self._estimates.after[name].survivals(ids, covered=True) for name in own}
        return candidates(taken, alone, after, max_tokens=self._config.max_window, max_branches=max_branches)


class Owners:
    def __init__(self) -> None:
        self._drafter: dict[str, str] = {}
        self.pace: float | None = None
        """Tokens per second and request that the last rounds promised: what a row's seconds are worth."""

    def promised(self, pace: float) -> None:
        # An average, since that of one round depends on who happened to have drafts.
        self.pace = pace if self.pace is None else self.pace + (pace - self.pace) / 16

    def of(self, ids: Sequence[str], survivals: Mapping[str, Floats], seconds: Mapping[str, Floats]) -> list[str]:
        """Return each request's drafter in this round (Algorithm 2 of 2511.16193); OFF for none.

        Requests share rounds, so a draft is worth its tokens less its seconds times the pace (Dinkelbach), and tokens
        per second while there is no pace.

        Args:
            survivals: by drafter [B][W], 0 behind the ends of drafts.
            seconds: by drafter [W], of rounds in which all requests have this window.
        """
        worths: dict[str, list[float]] = {}
        for name, survival_BW in survivals.items():
            tokens_BW, seconds_W = 1.0 + survival_BW.cumsum(axis=1), seconds[name]
            worth_BW = tokens_BW / seconds_W if self.pace is None else tokens_BW - self.pace * seconds_W
            # Drafters are compared at the windows that are best for them now.
            worths[name] = worth_BW.max(axis=1).tolist()
        accepted_B = np.any([survival_BW[:, 0] > 0.0 for survival_BW in survivals.values()], axis=0)
        owners = [OFF] * len(ids)
        for i in np.flatnonzero(accepted_B).tolist():
            worth = {name: of_requests[i] for name, of_requests in worths.items()}
            best, own = max(worth, key=worth.__getitem__), self._drafter.get(ids[i], OFF)
            if own in worth:
                least = worth[own] * (1.0 + MARGIN) if self.pace is None else worth[own] + MARGIN
                best = best if worth[best] > least else own
            owners[i] = best
        return owners

    def settle(self, ids: Sequence[str], drafts: Drafts, decision: Decision) -> Counter[tuple[str, str]]:
        """Note who drafted for whom. Returns how many requests changed, by (before, after)."""
        verified = {decision.drafter: decision.drafts, **decision.beside}
        found: Counter[tuple[str, str]] = Counter()
        for i, one in enumerate(ids):
            if decision.together and decision.to_draft[i]:
                after = decision.drafter
            else:
                after = next((name for name, lists in verified.items() if lists[i]), OFF)
            before = self._drafter.setdefault(one, after) if after != OFF else OFF
            if before == after:
                continue
            if before not in drafts or drafts[before][i]:
                self._drafter[one] = after
                found[before, after] += 1
        return found

    def forget(self, request_id: str) -> None:
        self._drafter.pop(request_id, None)


def reaching(survival_BW: Floats, lengths: Sequence[int]) -> Floats:
    """Return the survivals, 0 behind the ends of drafts."""
    return np.where(np.arange(survival_BW.shape[1]) < np.array(lengths)[:, None], survival_BW, 0.0)


def of_drafter(
    name: str,
    model: AcceptanceModel,
    costs: OnlineCosts,
    sequences: Sequence[DraftSequence],
    caps: Sequence[int],
    drafts: Sequence[Sequence[int]] | None,
    *,
    windows: Callable[..., Choice] = best_windows,
    ready: float = 1.0,
) -> Choice:
    """Return one drafter's best windows.

    Args:
        drafts: if they are there already.
        ready: share of requests for which it will have drafts, if they are not.
    """
    requests = len(sequences)
    lengths = caps if drafts is None else [len(draft) for draft in drafts]
    draft_s = costs.draft_s(name, requests)
    if drafts is not None:
        spent_s = draft_s(max(caps))
        draft_s = lambda depth: spent_s  # noqa: E731
    survival_BW = model.survivals([s.request_id for s in sequences], covered=drafts is not None) * ready
    verify_N1 = costs.verify_curve(requests, requests * (1 + model.max_window))
    return windows(survival_BW, lengths, verify_N1=verify_N1, draft_s=draft_s)


def _of_owners(drafts: Drafts, owners: Sequence[str], late: str, windows: Sequence[int]) -> Drafts:
    """Return each owner's drafts, cut to `windows`; the `late` drafter comes first, with none yet."""
    out: Drafts = {late: [[] for _ in owners]} if late else {}
    for name, lists in drafts.items():
        own = [
            draft[:window] if owner == name else [] for draft, owner, window in zip(lists, owners, windows, strict=True)
        ]
        if any(own):
            out[name] = own
    return out
