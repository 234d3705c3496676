"""How many draft tokens of each running request will be accepted. PURE: counts in, probabilities out.

A verify of a request is three counts: the drafter was *asked* for a window, *drafted* that many tokens or fewer, and
the first `accepted` of them were confirmed. Two conditional probabilities per position j = 1..max_window describe it:

    c_j = P(drafted >= j  | asked >= j,   accepted >= j - 1)      coverage: is there a draft token at all
    a_j = P(accepted >= j | drafted >= j, accepted >= j - 1)      acceptance
    survival_j = P(accepted >= j | asked >= j) = prod_{k <= j} c_k a_k, the chain rule: no independence is assumed

Counts are right-censored: positions up to `accepted` were right, at accepted + 1 the draft token was rejected or
missing, and of what lies behind, or beyond the window, nothing is known.

Estimates are Beta means with exponentially forgotten counts:
- position 1 has the prior mean `prior_rate`; the prior mean of a later a_j is `prior_decay` times the estimate of
  a_{j-1}. Coverage is believed (prior mean 1) until drafts are missing;
- drafts of equal confidence, where a drafter tells any (`tell`), have a_j of their own: a long match in a text is right
  nine times of ten, a short one once in four. Their prior mean is the estimate over all drafts;
- a request has Beta counts of its own, compared with what the drafter's a_j promised at the positions that it tried;
  the odds of all its a_j are scaled by the odds ratio, which is 1 for a new request.

Invariants: an outcome changes estimates after `observe` and never before; reading changes nothing; survival is in
[0, 1] and does not increase with j; a verify without a rejection never lowers the drafter's acceptance, and one that
rejects the first draft token never raises it; equal calls give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, repeat
from operator import mul

import numpy as np
from numpy.typing import NDArray

from specactor.errors import PlanError

CONFIDENCES = 4
"""How sure a drafter may be of a draft: 0 .. CONFIDENCES - 1."""
SURE = 8.0
"""Of what is remembered of drafts of one confidence, over what is of all, where little is."""
_UNKNOWN = (0.0, 0.0, 0.0)


def survival_of(p: float, window: int) -> tuple[float, ...]:
    """p, p^2, .., p^window: every draft token is accepted with probability p."""
    assert 0 <= p <= 1, p
    return tuple(accumulate(repeat(p, window), mul))


def checked(survival: Sequence[float]) -> tuple[float, ...]:
    """The same. Raises PlanError for what are no survivals."""
    if not survival or any(not 0 <= b <= a for a, b in pairwise((1.0, *survival))):
        raise PlanError(
            f"survival: got {tuple(survival)}, expected probabilities that do not rise, at least one. "
            "Give P(the first j draft tokens are accepted) for j = 1, 2, .."
        )
    return tuple(survival)


class _Positions:
    """Forgotten Beta counts of "went on at position j, having come so far", j = 0..size - 1."""

    __slots__ = ("_decay", "_first", "_hits", "_keep", "_trials", "_weight")

    def __init__(self, *, size: int, first: float, decay: float | None, weight: float, memory: float) -> None:
        """`first`: prior mean at position 0, of `weight` trials. `decay`: of the next position's prior mean by the
        estimate at this one; None: all have `first`. `memory`: trials of a position that count."""
        self._first, self._decay, self._weight, self._keep = first, decay, weight, 1.0 - 1.0 / memory
        self._hits = [0.0] * size
        self._trials = [0.0] * size

    def means(self, priors: Sequence[float] | None = None) -> list[float]:
        """`priors`: prior means, in place of those that follow from the first."""
        prior, weight, decay = self._first, self._weight, self._decay
        if priors is not None:
            counts = zip(self._hits, self._trials, priors, strict=True)
            return [(hits + weight * p) / (trials + weight) for hits, trials, p in counts]
        out = []
        for hits, trials in zip(self._hits, self._trials, strict=True):
            mean = (hits + weight * prior) / (trials + weight)
            out.append(mean)
            if decay is not None:
                prior = decay * mean
        return out

    def add(self, hits: int, *, missed: bool, priors: Sequence[float] | None = None) -> list[float]:
        """Positions before `hits` went on; if `missed`, position `hits` did not. Returns what the estimates before this
        call were at these positions. `priors`: as of `means`."""
        prior, weight, decay, keep = self._first, self._weight, self._decay, self._keep
        all_hits, all_trials = self._hits, self._trials
        promised = []
        for j in range(hits + missed):
            had, trials = all_hits[j], all_trials[j]
            mean = (had + weight * (prior if priors is None else priors[j])) / (trials + weight)
            promised.append(mean)
            if decay is not None:
                prior = decay * mean
            all_hits[j] = had * keep + (j < hits)
            all_trials[j] = trials * keep + 1.0
        return promised

    def overall(self) -> float:
        return (sum(self._hits) + self._weight * self._first) / (sum(self._trials) + self._weight)

    @property
    def most_trials(self) -> float:
        return max(self._trials)

    def scale(self, weight: float) -> None:
        self._hits = [x * weight for x in self._hits]
        self._trials = [x * weight for x in self._trials]


@dataclass(kw_only=True, eq=False, slots=True)
class AcceptanceModel:
    """What one drafter achieves, overall and for each running request."""

    max_window: int
    """Positions kept apart. Draft tokens beyond are not looked at."""
    prior_rate: float = 0.7
    """Believed a_1 of a drafter nobody has seen; hopeful, so that it is tried. In (0, 1)."""
    prior_decay: float = 0.97
    """Believed a_j / a_{j-1}. In (0, 1]."""
    prior_weight: float = 8.0
    """Trials per position that the prior is worth."""
    memory: float = 2000.0
    """Trials of a position that count; older ones fade (half after 0.7 times this)."""
    request_weight: float = 16.0
    """Trials that the drafter's rate is worth against a request's own."""
    request_memory: float = 64.0
    """Verifies of a request that count: text changes on the way."""

    _acceptance: _Positions = field(init=False, repr=False)
    _coverage: _Positions = field(init=False, repr=False)
    _sure: list[_Positions] = field(init=False, repr=False)
    _told: dict[str, int] = field(init=False, repr=False, default_factory=dict)
    """Confidence of the drafts that are there now, by request."""
    _requests: dict[str, tuple[float, float, float]] = field(init=False, repr=False, default_factory=dict)
    """(accepted, trials, promised by the drafter's estimates), forgotten, of each request."""
    _known: tuple[list[float], list[float], float] | None = field(init=False, repr=False, default=None)
    """(a, c, rate): a cache of what follows from the counts."""
    _known_sure: list[list[float]] | None = field(init=False, repr=False, default=None)
    """a by confidence, and of drafts without one: the same."""

    def __post_init__(self) -> None:
        assert self.max_window >= 1, "use mode off to disable speculation"
        size, weight, memory = self.max_window, self.prior_weight, self.memory
        self._acceptance, *self._sure = (
            _Positions(size=size, first=self.prior_rate, decay=self.prior_decay, weight=weight, memory=memory)
            for _ in range(1 + CONFIDENCES)
        )
        self._coverage = _Positions(size=size, first=1.0, decay=None, weight=weight, memory=memory)

    @property
    def rate(self) -> float:
        """P(a draft token is accepted | those before it were), over all positions. It is more than
        accept_rate = accepted / drafted, which also counts the draft tokens behind a rejected one."""
        return self._estimates()[2]

    def tell(self, request_ids: Sequence[str], confidences: Sequence[int]) -> None:
        """How sure the drafter is of the drafts that are there now; empty: it does not know."""
        if not confidences:
            self._told.clear()
            return
        for request_id, confidence in zip(request_ids, confidences, strict=True):
            self._told[request_id] = min(max(0, confidence), CONFIDENCES - 1)

    def told(self, request_id: str) -> int | None:
        """How sure the drafter is of the request's draft; None: it does not say."""
        return self._told.get(request_id)

    def observe(
        self,
        request_id: str,
        drafted: int,
        accepted: int,
        *,
        asked: int | None = None,
        confidence: int | None = None,
    ) -> None:
        """A verify has ended. All counts are draft tokens; `asked` None: not known, and coverage learns nothing.
        `confidence`: that was `told` of this draft.

        Nothing changes if nothing was drafted, except coverage.
        """
        assert 0 <= accepted <= drafted <= (drafted if asked is None else asked), (accepted, drafted, asked)
        hits = min(accepted, self.max_window)
        inside = accepted < self.max_window
        if asked:
            reached = hits + (inside and drafted > accepted)
            self._coverage.add(reached, missed=inside and drafted == accepted < asked)
            self._known = self._known_sure = None
        if not drafted:
            return
        rejected = inside and drafted > accepted
        promises = self._acceptance.add(hits, missed=rejected)
        if confidence is not None:
            promises = self._sure[confidence].add(hits, missed=rejected, priors=promises)
        promised = sum(promises)
        self._known = self._known_sure = None
        own_accepted, own_trials, own_promised = self._requests.get(request_id, _UNKNOWN)
        keep = 1.0 - 1.0 / self.request_memory
        self._requests[request_id] = (
            own_accepted * keep + hits,
            own_trials * keep + hits + rejected,
            own_promised * keep + promised,
        )

    def survival(self, request_id: str, max_window: int, *, drafted: int | None = None) -> list[float]:
        """P(the first j draft tokens are proposed and accepted) for j = 1..max_window; not increasing.

        A request that was never observed has the drafter's mean. `drafted`: the number of draft tokens where they are
        there already (a text drafter costs so little that it can be asked before windows are chosen): the list then
        has min(drafted, max_window) entries and holds acceptance alone.
        """
        assert 0 <= max_window <= self.max_window, max_window
        acceptance, coverage, rate = self._estimates()
        if (confidence := self._told.get(request_id)) is not None:
            acceptance = self._by_confidence()[confidence]
        scale = self._odds_ratio(request_id, rate)
        survived = 1.0
        out = []
        if drafted is None:
            for j in range(max_window):
                odds = acceptance[j] * scale
                survived *= odds / (odds + 1.0 - acceptance[j]) * coverage[j]
                out.append(survived)
        else:
            for a in acceptance[: min(drafted, max_window)]:
                odds = a * scale
                survived *= odds / (odds + 1.0 - a)
                out.append(survived)
        return out

    def survivals(self, request_ids: Sequence[str], *, covered: bool) -> NDArray[np.float64]:
        """`survival` of many requests at once, with the same bits; [requests][max_window]. `covered`: of draft tokens
        that are there already, so acceptance alone."""
        acceptance, coverage, rate = self._estimates()
        a_BW = np.array([acceptance])
        if self._told:
            rows = [self._told.get(name, CONFIDENCES) for name in request_ids]
            a_BW = np.array(self._by_confidence())[rows].reshape(-1, self.max_window)
        own_B3 = np.array([self._requests.get(name, _UNKNOWN) for name in request_ids]).reshape(-1, 3)
        accepted_B, trials_B, promised_B = own_B3.T
        yes, no = self.request_weight * rate, self.request_weight * (1.0 - rate)
        scale_B = (
            (accepted_B + yes) * (trials_B - promised_B + no) / ((trials_B - accepted_B + no) * (promised_B + yes))
        )
        odds_BW = scale_B[:, None] * a_BW
        step_BW = odds_BW / (odds_BW + 1.0 - a_BW)
        if not covered:
            step_BW *= np.array(coverage)
        survived_BW: NDArray[np.float64] = step_BW.cumprod(axis=1)
        return survived_BW

    def forget(self, request_id: str) -> None:
        """The request has ended. What it taught about the drafter stays."""
        self._requests.pop(request_id, None)
        self._told.pop(request_id, None)

    def new_version(self, weight: float) -> None:
        """The drafter or the policy has changed: what was seen is worth `weight` (0..1) of what it was."""
        assert 0 <= weight <= 1, weight  # from nothing known to all as before
        for positions in self._sure:
            positions.scale(weight)
        self._fade(weight)

    def limit(self, trials: float) -> None:
        """All that was seen is worth at most so many trials per position, so that news count; and `SURE` times as many
        for drafts of one confidence, which are much alike whatever the request."""
        for positions in self._sure:
            if positions.most_trials > SURE * trials:
                positions.scale(SURE * trials / positions.most_trials)
        seen = max(self._acceptance.most_trials, self._coverage.most_trials)
        self._fade(min(1.0, trials / seen) if seen else 1.0)

    def _fade(self, weight: float) -> None:
        """What was seen, of drafts whose confidence is not told apart."""
        self._acceptance.scale(weight)
        self._coverage.scale(weight)
        self._requests = {name: (a * weight, n * weight, p * weight) for name, (a, n, p) in self._requests.items()}
        self._known = self._known_sure = None

    def _estimates(self) -> tuple[list[float], list[float], float]:
        if self._known is None:
            self._known = (self._acceptance.means(), self._coverage.means(), self._acceptance.overall())
        return self._known

    def _by_confidence(self) -> list[list[float]]:
        if self._known_sure is None:
            acceptance, _, _ = self._estimates()
            self._known_sure = [*(positions.means(acceptance) for positions in self._sure), acceptance]
        return self._known_sure

    def _odds_ratio(self, request_id: str, rate: float) -> float:
        """Odds of the request's rate over the odds of what the drafter promised at the same positions; > 0."""
        own = self._requests.get(request_id)
        if own is None:
            return 1.0
        accepted, trials, promised = own
        yes, no = self.request_weight * rate, self.request_weight * (1.0 - rate)
        return (accepted + yes) * (trials - promised + no) / ((trials - accepted + no) * (promised + yes))
