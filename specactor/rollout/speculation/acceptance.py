"""How many draft tokens of each request will be accepted. PURE.

    c_j = P(drafted >= j | asked >= j, accepted >= j-1)       coverage
    a_j = P(accepted >= j | drafted >= j, accepted >= j-1)    acceptance
    survival_j = prod_{k <= j} c_k a_k = P(accepted >= j | asked >= j)

Invariants: reading changes nothing; survival does not increase with j; a verify without a rejection never lowers
acceptance, one that rejects the first draft token never raises it; equal calls give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, repeat
from operator import index, mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specactor.errors import PlanError

CONFIDENCES = 4  # levels of a drafter's confidence in a draft: 0 .. CONFIDENCES - 1
Floats = NDArray[np.float64]
Counts = NDArray[np.intp]


def survival_of(p: float, window: int) -> tuple[float, ...]:
    """Return p, p^2, .., p^window."""
    assert 0 <= p <= 1, p
    return tuple(accumulate(repeat(p, window), mul))


def checked(survival: Sequence[float]) -> tuple[float, ...]:
    """Return the survivals. Raises PlanError unless they are falling probabilities."""
    if not survival or any(not 0 <= b <= a for a, b in pairwise((1.0, *survival))):
        raise PlanError(
            f"survival: got {tuple(survival)}, expected probabilities that do not rise, at least one. "
            "Give P(the first j draft tokens are accepted) for j = 1, 2, .."
        )
    return tuple(survival)


class _Positions:
    """Beta counts by kind and position; older ones fade."""

    def __init__(
        self, *, kinds: int = 1, size: int, first: float, decay: float | None, weight: float, memory: float
    ) -> None:
        """`decay`: a position's prior mean over the estimate before it; None: all have the prior mean `first`."""
        self._first, self._decay, self._weight, self._keep = first, decay, weight, 1.0 - 1.0 / memory
        self._hits = np.zeros((kinds, size))
        self._trials = np.zeros((kinds, size))

    def means(self) -> Floats:
        prior, means = self._first, []
        for hits, trials in zip(self._hits[0].tolist(), self._trials[0].tolist(), strict=True):
            means.append((hits + self._weight * prior) / (trials + self._weight))
            if self._decay is not None:
                prior = self._decay * means[-1]
        return np.array(means)

    def means_from(self, priors: Floats) -> Floats:
        means: Floats = (self._hits + self._weight * priors) / (self._trials + self._weight)
        return means

    def add(self, hits_B: Counts, trials_B: Counts, kind_B: Counts | int = 0) -> None:
        """Count verifies that went on from `hits_B` of the `trials_B` positions they reached."""
        # Nothing is known of positions behind a rejected or missing token. Verifies of a round are worth the same.
        trials = self._reaching(trials_B, kind_B)
        kept = self._keep**trials
        worth = np.where(trials > 0, (1.0 - kept) / ((1.0 - self._keep) * np.maximum(trials, 1)), 0.0)
        self._hits = self._hits * kept + self._reaching(hits_B, kind_B) * worth
        self._trials = self._trials * kept + trials * worth

    def _reaching(self, lengths_B: Counts, kind_B: Counts | int) -> Counts:
        """Return [kinds][size]: how many lengths exceed 0, 1, .. size - 1."""
        kinds, size = self._hits.shape
        ending = np.bincount(lengths_B + (size + 1) * kind_B, minlength=kinds * (size + 1)).reshape(kinds, size + 1)
        reaching: Counts = ending[:, :0:-1].cumsum(axis=1)[:, ::-1]
        return reaching

    def overall(self) -> float:
        return float((self._hits.sum() + self._weight * self._first) / (self._trials.sum() + self._weight))

    @property
    def most_trials(self) -> Floats:
        most: Floats = self._trials.max(axis=1)
        return most

    def scale(self, weight: float | Floats) -> None:
        self._hits = (self._hits.T * weight).T
        self._trials = (self._trials.T * weight).T


@dataclass(kw_only=True, eq=False)
class AcceptanceModel:
    """Estimates one drafter's acceptance, overall and by request, whose odds are the drafter's times an odds ratio.
    Estimates are Beta means of counts that are forgotten exponentially."""

    max_window: int  # positions that are told apart; later draft tokens are ignored
    prior_rate: float = 0.7  # prior mean of a_1, in (0, 1); hopeful, so that a new drafter is tried
    prior_decay: float = 0.97  # prior mean of a_j over the estimate of a_{j-1}, in (0, 1]
    prior_weight: float = 8.0  # trials per position that the prior is worth
    memory: float = 2000.0  # trials of a position that count; older ones fade (half after 0.7 times this)
    request_weight: float = 16.0  # trials that the drafter's rate is worth against a request's own
    request_memory: float = 64.0  # verifies of a request that count: its text changes on the way

    _told: dict[str, int] = field(init=False, repr=False, default_factory=dict)
    """Confidence in the present draft, by request."""
    _row: dict[str, int] = field(init=False, repr=False, default_factory=dict)  # row of `_seen`, by request

    def __post_init__(self) -> None:
        assert self.max_window >= 1, "use mode off to disable speculation"
        size, weight, memory = self.max_window, self.prior_weight, self.memory
        same: dict[str, Any] = {"size": size, "weight": weight, "memory": memory}
        self._acceptance = _Positions(first=self.prior_rate, decay=self.prior_decay, **same)
        # Drafts of one confidence: a long match in a text is right nine times of ten, a short one once in four.
        self._sure = _Positions(kinds=CONFIDENCES, first=self.prior_rate, decay=None, **same)
        self._coverage = _Positions(first=1.0, decay=None, **same)  # believed until drafts are missing
        # (accepted, trials, promised by the drafter's estimates), forgotten, of each request. Row 0: not seen yet.
        self._seen = np.zeros((1, 3))
        self._free: list[int] = []
        self._known: tuple[Floats, Floats, float] | None = None  # (a by confidence, c, rate), if nothing changed

    @property
    def rate(self) -> float:
        """P(a draft token is accepted | those before it were), above accepted / drafted."""
        return self._estimates()[2]

    def tell(self, request_ids: Sequence[str], confidences: Sequence[int]) -> None:
        """Note the confidence in the present drafts; empty: not known. Raises TypeError and ValueError, and changes
        nothing, unless they are integers, one for each."""
        told = list(confidences)
        # Later they are indices of arrays, which booleans and other integers index otherwise.
        if told and not ({*map(type, told)} == {int} and 0 <= min(told) <= max(told) < CONFIDENCES):
            told = [min(max(0, int(index(confidence))), CONFIDENCES - 1) for confidence in told]
        self._told = dict(zip(request_ids, told, strict=True)) if told else {}

    def told(self, request_id: str) -> int:
        """Return the confidence in the request's draft; CONFIDENCES for none."""
        return self._told.get(request_id, CONFIDENCES)

    def observe(self, request_id: str, drafted: int, accepted: int, *, asked: int | None = None) -> None:
        self.observe_all([request_id], [drafted], [accepted], asked=None if asked is None else [asked])

    def observe_all(
        self,
        request_ids: Sequence[str],
        drafted: Sequence[int],
        accepted: Sequence[int],
        *,
        asked: Sequence[int] | None = None,
        sure: Sequence[int] | None = None,
    ) -> None:
        """Learn from one round's verifies, of different requests.

        Args:
            asked: None: unknown; coverage then learns nothing.
            sure: confidences, CONFIDENCES for none; None: those of `tell`.
        """
        if sure is None:
            sure = self._confidences(request_ids)
        drafted_B, accepted_B, sure_B = np.array(drafted), np.array(accepted), np.array(sure)
        assert ((accepted_B >= 0) & (accepted_B <= drafted_B)).all(), (accepted, drafted)
        hits_B = np.minimum(accepted_B, self.max_window)
        is_inside_B = accepted_B < self.max_window
        was_rejected_B = is_inside_B & (drafted_B > accepted_B)
        if asked is not None:
            asked_B = np.array(asked)
            assert (drafted_B <= asked_B).all(), (drafted, asked)
            reached_B = hits_B + was_rejected_B
            was_missing_B = is_inside_B & (drafted_B == accepted_B) & (accepted_B < asked_B)
            self._coverage.add(reached_B[asked_B > 0], (reached_B + was_missing_B)[asked_B > 0])
        rows_N = drafted_B.nonzero()[0]
        if len(rows_N):
            hits_N, sure_N = hits_B[rows_N], sure_B[rows_N]
            self._count([request_ids[i] for i in rows_N.tolist()], hits_N, hits_N + was_rejected_B[rows_N], sure_N)
        self._known = None

    def _count(self, request_ids: Sequence[str], hits_N: Counts, trials_N: Counts, sure_N: Counts) -> None:
        a_CW = self._estimates()[0]  # those before the round
        promised_CW = np.pad(a_CW.cumsum(axis=1), ((0, 0), (1, 0)))
        rows_N = [self._row_of(request_id) for request_id in request_ids]
        self._seen[rows_N] *= 1.0 - 1.0 / self.request_memory
        self._seen[rows_N] += np.stack([hits_N, trials_N, promised_CW[sure_N, trials_N]], axis=1)
        is_told_N = sure_N < CONFIDENCES
        self._sure.add(hits_N[is_told_N], trials_N[is_told_N], sure_N[is_told_N])
        self._acceptance.add(hits_N, trials_N)

    def survivals(self, request_ids: Sequence[str], *, covered: bool) -> Floats:
        """Return survival_j [requests][max_window]; `covered`: of drafts that are there (acceptance alone)."""
        a_CW, coverage_W, rate = self._estimates()
        a_BW = a_CW[self._confidences(request_ids)] if self._told else a_CW[-1:]
        row = self._row
        accepted_B, trials_B, promised_B = self._seen[[row.get(name, 0) for name in request_ids]].T
        # Odds of the request's rate over the odds of what the drafter promised at the same positions.
        yes, no = self.request_weight * rate, self.request_weight * (1.0 - rate)
        scale_B = (
            (accepted_B + yes) * (trials_B - promised_B + no) / ((trials_B - accepted_B + no) * (promised_B + yes))
        )
        odds_BW = scale_B[:, None] * a_BW
        step_BW = odds_BW / (odds_BW + 1.0 - a_BW)
        if not covered:
            step_BW *= coverage_W
        survived_BW: Floats = step_BW.cumprod(axis=1)
        return survived_BW

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended; what it taught about the drafter stays."""
        self._told.pop(request_id, None)
        if (row := self._row.pop(request_id, None)) is not None:
            self._seen[row] = 0.0
            self._free.append(row)

    def new_version(self, weight: float = 0.5) -> None:
        """Count what was seen with `weight` (0..1): drafter or policy has changed."""
        assert 0 <= weight <= 1, weight  # from nothing known to all as before
        self._sure.scale(weight)
        self._fade(weight)

    def limit(self, trials: float = 8.0) -> None:
        """Let what was seen count for at most `trials` per position: a look brings little that is new."""
        # Drafts of one confidence are much alike, whatever the request, so eight times as many are kept.
        most = np.maximum(self._sure.most_trials, 1e-9)  # where nothing was seen, nothing changes
        self._sure.scale(np.minimum(1.0, 8.0 * trials / most))
        seen = float(max(self._acceptance.most_trials[0], self._coverage.most_trials[0]))
        self._fade(min(1.0, trials / seen) if seen else 1.0)

    def _fade(self, weight: float) -> None:
        self._acceptance.scale(weight)
        self._coverage.scale(weight)
        self._seen *= weight
        self._known = None

    def _estimates(self) -> tuple[Floats, Floats, float]:
        """Return (a [CONFIDENCES + 1][W], the last row without confidence; c [W]; rate)."""
        if self._known is None:
            acceptance_W = self._acceptance.means()
            a_CW = np.vstack([self._sure.means_from(acceptance_W), acceptance_W])
            self._known = a_CW, self._coverage.means(), self._acceptance.overall()
        return self._known

    def _confidences(self, request_ids: Sequence[str]) -> list[int]:
        told = self._told
        return [told.get(name, CONFIDENCES) for name in request_ids]

    def _row_of(self, request_id: str) -> int:
        row = self._row.get(request_id)
        if row is None:
            if not self._free:
                size = len(self._seen)
                self._seen = np.concatenate([self._seen, np.zeros((size, 3))])
                self._free.extend(range(2 * size - 1, size - 1, -1))
            row = self._row[request_id] = self._free.pop()
        return row
