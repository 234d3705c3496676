"""What is true in a simulation: requests, how easy each is to draft, rounds, and progress. PURE.

Invariants: a prompt's requests are neighbours; a round emits at least one token per request; with drafts of the
verifier's own devices better survivals emit no less. A request gains mean tokens per round, and stays as many standard
deviations off its mean as it drew at first: so the last of many ends as late as when every token is drawn.

Shapes: N requests; of a round B requests, W positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from specactor.errors import PlanError
from specactor.planning.plans import Mode, there
from specactor.rollout.speculation.costs import CostTable, Grid

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Lengths:
    median: float = 4000.0
    sigma: float = 1.0  # standard deviation of the logarithm: at 1 the 95th percentile is 5.2 medians
    longest: int = 20000
    alike: float = 0.5  # correlation of the logarithms within a prompt's group

    def __post_init__(self) -> None:
        if not (self.median >= 1 and self.sigma >= 0 and self.longest >= 1 and 0 <= self.alike <= 1):
            got = (self.median, self.sigma, self.longest, self.alike)
            raise PlanError(f"lengths (median, sigma, longest, alike): got {got}, expected >= 1, >= 0, >= 1, 0..1.")

    def draw(self, rng: np.random.Generator, group_N: Ints) -> Ints:
        own_N = rng.standard_normal(len(group_N))
        shared_N = rng.standard_normal(int(group_N.max()) + 1)[group_N]
        z_N = np.sqrt(self.alike) * shared_N + np.sqrt(1.0 - self.alike) * own_N
        tokens_N: Ints = np.round(self.median * np.exp(self.sigma * z_N)).clip(1, self.longest).astype(np.int64)
        return tokens_N


@dataclass(frozen=True, kw_only=True)
class Method:
    rate: float  # P(its first draft token is accepted) of the median request, at the start, freshly trained
    decay: float = 0.98  # from one position of a draft to the next, given that all before were accepted
    spread: float = 0.5  # standard deviation among requests of the log-odds of being accepted
    drift: float = 0.0  # share of the acceptance that is lost per 1,000 tokens of a response
    staleness: float = 0.0  # share of the acceptance lost per policy version since the refresh

    def positions(self, window: int) -> Floats:
        """Return [window] acceptances of the median request, fresh."""
        return self.rate * self.decay ** np.arange(window, dtype=np.float64)

    def survival(self, window: int) -> tuple[float, ...]:
        return tuple(self.positions(window).cumprod().tolist())

    def kept(self, age: int, tokens_B: Floats) -> Floats:
        """Return the share of the acceptance left after so many versions and tokens."""
        return (1.0 - self.staleness) ** age * (1.0 - self.drift) ** (tokens_B / 1000.0)


@dataclass(frozen=True, kw_only=True)
class World:
    methods: Mapping[str, Method]  # by drafter
    start_s: float = 5.0  # from a rollout's begin to the first round: engines take their memory back
    host_s: float = 0.0  # between two passes of an engine, in which its device has nothing to do
    replan_s: float = 0.002  # seconds of an engine for deciding anew
    rollback_s: float = 0.0005  # of a drafter for going back to the commit, per round in which all requests do
    jitter: float = 0.0  # standard deviation of the logarithm of engines' slowness: stragglers


@dataclass(frozen=True, kw_only=True, eq=False)
class Requests:
    lengths: Ints  # [N], tokens
    groups: Ints  # [N], of a prompt each
    odds: Floats  # [N], of being accepted, over the median request's; all methods find the same text easy
    luck: Floats | None = None  # [N], standard deviations by which more is accepted than on average; None: drawn

    def __len__(self) -> int:
        return len(self.lengths)


def draw(lengths: Lengths, *, prompts: int, group_size: int, seed: Sequence[int]) -> Requests:
    """Draw requests. `odds` are for a spread of 1; a method's own is a power of it."""
    assert min(prompts, group_size) >= 1, (prompts, group_size)
    rng = np.random.default_rng(list(seed))
    group_N = np.repeat(np.arange(prompts, dtype=np.int64), group_size)
    return Requests(lengths=lengths.draw(rng, group_N), groups=group_N, odds=np.exp(rng.standard_normal(len(group_N))))


def survivals(method: Method, odds_B: Floats, tokens_B: Floats, *, window: int, age: int) -> Floats:
    """Return [B, window] of requests that have so many tokens by now."""
    a_W = method.positions(window)
    scale_B1 = (odds_B**method.spread)[:, None]
    odds_BW = scale_B1 * a_W
    a_BW = odds_BW / (odds_BW + 1.0 - a_W)
    a_BW *= method.kept(age, tokens_B)[:, None]
    survived_BW: Floats = a_BW.cumprod(axis=1)
    return survived_BW


MODES: tuple[Mode, ...] = ("off", "coupled", "decoupled")
OFF, COUPLED, DECOUPLED = range(3)  # what a request does: its place in MODES


@dataclass(frozen=True, kw_only=True)
class Remote:
    seconds: Grid
    served: float  # requests that it drafts for, those of other engines too
    message_s: float
    rollback_s: float = 0.0

    def drafted(self, round_s: float, window: int) -> tuple[float, float]:
        """Return tokens of a request per round, and those after an unexpected commit."""
        token_s = self.seconds.at(max(self.served, 1.0), window) / window
        return round_s / token_s, max(0.0, round_s - self.message_s - self.rollback_s) / token_s


@dataclass(frozen=True, kw_only=True, eq=False)
class Round:
    seconds: float
    tokens: Floats  # [B]: emitted
    drafted: Floats  # [B]: draft tokens that are verified
    variance: Floats  # [B]: of the tokens of a round
    most: Floats  # [B]: tokens of a round


def round_of(
    survival_BW: Floats,
    mode_B: Ints,
    window_B: Ints,
    *,
    table: CostTable,
    drafter: str = "",
    remote: Remote | None = None,
    host_s: float = 0.0,
) -> Round:
    """Return a round that verifies `drafter`'s tokens, and has `host_s` between its passes.

    On the verifier's devices a request has its window in every round; of what `remote` drafts a round takes what is
    there (`there`), as real engines do.
    """
    requests, width = survival_BW.shape
    offered_BW = survival_BW * (np.arange(1, width + 1) <= window_B[:, None])
    drafted_B = window_B.astype(np.float64)
    ahead_B = mode_B == DECOUPLED
    draft_s = 0.0
    here_B = (mode_B == COUPLED) & (window_B > 0)
    if here_B.any():
        draft_s = table.draft_s(drafter, int(here_B.sum()), int(window_B[here_B].max()))
    if ahead_B.any():
        assert remote is not None
        share_BW = _shares_there(survival_BW, window_B, ahead_B, table=table, remote=remote, more_s=draft_s + host_s)
        offered_BW *= share_BW
        drafted_B = np.where(ahead_B, share_BW.sum(axis=1), drafted_B)
    seconds = _verify_s(table, requests, drafted_B) + host_s + draft_s
    accepted_B, variance_B = _accepted(offered_BW)
    most_B = 1.0 + window_B.astype(np.float64)
    return Round(seconds=seconds, tokens=1.0 + accepted_B, drafted=drafted_B, variance=variance_B, most=most_B)


def _accepted(offered_BW: Floats) -> tuple[Floats, Floats]:
    """Return [B] means and variances, from P(j tokens or more are accepted)."""
    mean_B = offered_BW.sum(axis=1)
    variance_B = offered_BW @ (2.0 * np.arange(1, offered_BW.shape[1] + 1) - 1.0) - mean_B**2
    return mean_B, np.where(variance_B > 1e-9, variance_B, 0.0)  # else rounds emit as much, but for rounding


def _verify_s(table: CostTable, requests: int, drafted_B: Floats) -> float:
    drafted = float(drafted_B.sum())
    return table.verify_s(requests, requests + drafted) if drafted > 0 else table.plain_s(requests)


STEPS_PER_TOKEN, STEPS_PER_RATE = 8, 50
"""How finely tokens of a round and acceptances are told apart where what is there is kept for the next time."""


def _shares_there(
    survival_BW: Floats, window_B: Ints, ahead_B: Flags, *, table: CostTable, remote: Remote, more_s: float
) -> Floats:
    """Return [B, W]: P(a round, of a verify and `more_s`, has j tokens); 1 for those drafted here."""
    requests, width = survival_BW.shape
    window = int(window_B[ahead_B].max())
    share_BW = np.ones((requests, width))
    ahead = np.flatnonzero(ahead_B)
    # Requests of about equal acceptance have one share.
    groups = np.array_split(ahead[survival_BW[ahead, 0].argsort(kind="stable")], min(4, len(ahead)))
    step_BW = survival_BW.copy()
    step_BW[:, 1:] /= np.maximum(survival_BW[:, :-1], 1e-12)
    keys = [tuple(np.round(step_BW[group].mean(axis=0) * STEPS_PER_RATE).astype(int).tolist()) for group in groups]
    drafted_B, round_s = np.where(ahead_B, 0, window_B).astype(np.float64), 0.0
    for _ in range(4 if window else 0):  # longer rounds have more rows, which make them longer: both are found anew
        before_s, round_s = round_s, _verify_s(table, requests, drafted_B) + more_s
        if abs(round_s - before_s) <= 0.01 * round_s:
            break
        drafted, afresh = (round(STEPS_PER_TOKEN * tokens) for tokens in remote.drafted(round_s, window))
        for key, group in zip(keys, groups, strict=True):
            share_BW[group] = _there(key, window, drafted, afresh, 2 * (width - 1))
        share_BW *= np.arange(1, width + 1) <= window_B[:, None]
        drafted_B = share_BW.sum(axis=1)
    return share_BW


@lru_cache(maxsize=1 << 16)
def _there(rates: tuple[int, ...], window: int, drafted: int, afresh: int, most: int) -> tuple[float, ...]:
    """Return [W], of rounded rates."""
    survival = np.cumprod(np.array(rates) / STEPS_PER_RATE).tolist()
    found_K = there(survival, window, drafted=drafted / STEPS_PER_TOKEN, afresh=afresh / STEPS_PER_TOKEN, most=most)
    at_least = found_K[::-1].cumsum()[::-1][1:].clip(0.0, 1.0).tolist()
    return (*at_least, *[0.0] * (len(rates) - window))


class Progress:
    def __init__(self, lengths: Ints, luck_N: Floats) -> None:
        """`lengths` [N] are tokens; `luck_N` counts standard deviations by which each is ahead."""
        self.length_N = lengths.astype(np.float64)
        self.luck_N = luck_N
        self.done_N: Floats = np.zeros(len(lengths))  # means
        self._variance_N: Floats = np.zeros(len(lengths))
        self._turns_N: Floats = np.zeros(len(lengths))  # rounds, each of which emitted a token or more
        self._most_N: Floats = np.zeros(len(lengths))  # tokens that they emitted at most

    def add(self, running: Ints, of: Round, rounds: float) -> None:
        self.done_N[running] += rounds * of.tokens
        self._variance_N[running] += rounds * of.variance
        self._turns_N[running] += rounds
        self._most_N[running] += rounds * of.most

    def rounds_left(self, running: Ints, of: Round) -> Floats:
        """Return [B] rounds like this one until each has finished."""
        # Where rounds vary the last emits more than what is left: half of a token-weighted mean round (renewals).
        beyond_B = np.where(of.variance > 0, ((of.variance + of.tokens**2) / of.tokens - 1.0) / 2.0, 0.0)
        luck_B, variance_B, done_B = self.luck_N[running], self._variance_N[running], self.done_N[running]
        left_B = self.length_N[running] + beyond_B - done_B - luck_B * np.sqrt(variance_B)
        rounds_B = np.where(left_B > 0, _crossing(left_B, luck_B, variance_B, of), 0.0)
        least_B = (self.length_N[running] - self._most_N[running]) / of.most
        most_B = self.length_N[running] - self._turns_N[running]
        return rounds_B.clip(least_B, np.maximum(most_B, least_B)).clip(0.0)

    def finish(self, gone: Ints) -> float:
        """Return the tokens that they emitted beyond the mean."""
        luck = float((self.length_N[gone] - self.done_N[gone]).sum())
        self.done_N[gone] = self.length_N[gone]
        return luck


def _crossing(left_B: Floats, luck_B: Floats, variance_B: Floats, of: Round) -> Floats:
    """Return the r at which r tokens + luck (sqrt(variance + r own) - sqrt(variance)) reaches what is left."""
    own_B = np.maximum(of.variance, 1e-12)
    a_B = of.tokens / own_B
    c_B = a_B * variance_B + luck_B * np.sqrt(variance_B) + left_B
    root_B = (-luck_B + np.sqrt(np.maximum(luck_B**2 + 4.0 * a_B * c_B, 0.0))) / (2.0 * a_B)
    found_B: Floats = np.where(of.variance > 0, (root_B**2 - variance_B) / own_B, left_B / of.tokens)
    return found_B
