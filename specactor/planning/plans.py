"""Plans of a rollout, the options for `search`, and tokens that rounds emit. PURE.

Sizes are bytes, times seconds, counts devices, engines, requests or tokens. survival_j = P(the first j draft tokens are
accepted). Shapes: B requests, W windows 1..w; S states, K windows 0..w.

Invariants: a window of 0 is plain decoding, and nothing else is; no count, time or probability is out of range; a round
emits at least 1 token, and no fewer when survivals rise; with a drafter that takes no time `running` has windows as
often as `ready` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, isfinite
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specactor.config import MAX_WINDOW
from specactor.errors import PlanError
from specactor.rollout.speculation.acceptance import checked
from specactor.rollout.speculation.costs import METHOD, CostTable, Grid
from specactor.rollout.speculation.windows import OFF

TEXT_DRAFTERS = ("suffix", "previous")  # they look things up on the host, where the verifier is

Mode = Literal["off", "coupled", "decoupled"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    engines: int
    devices_each: int

    @property
    def devices(self) -> int:
        return self.engines * self.devices_each


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    mode: Mode  # with drafter and window that of every request, to begin with
    drafter: str  # OFF for plain decoding
    window: int  # draft tokens per verify; 0 for plain decoding
    verifiers: Placement
    drafters: Placement
    idle_devices: int
    requests_per_engine: int  # at once on a verifier; more wait where there are more
    round_s: float
    tokens_per_round: float  # emitted, of a request
    tokens_per_s: float  # of the whole cluster
    tokens_per_s_per_device: float  # of all devices, idle ones too
    speedup: float = 1.0  # over the fastest plan that does not speculate
    reason: str = ""

    def __post_init__(self) -> None:
        plain = (self.mode == OFF, self.drafter == OFF, self.window == 0)
        assert self.window >= 0, self
        assert len(set(plain)) == 1, f"a window of 0 goes with mode and drafter {OFF}: {self}"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    devices: int
    requests: int  # that are there to run at once, in all
    message_s: float = 1e-4  # from a commit's departure to the arrival of what it changes, without drafting

    def __post_init__(self) -> None:
        assert min(self.devices, self.requests) >= 1, self
        assert self.message_s >= 0, self


@dataclass(frozen=True, kw_only=True)
class Footprint:
    weights_bytes: float  # one copy
    request_bytes: float  # KV of one request, at the length to plan for


NOTHING = Footprint(weights_bytes=0.0, request_bytes=0.0)


@dataclass(frozen=True, kw_only=True)
class VerifierOption:
    devices: int
    costs: CostTable  # with a grid for every drafter that can draft on these devices
    footprint: Footprint = NOTHING
    capacity_bytes: float = float("inf")  # of the engine's devices together, for weights and KV
    ahead_s: Grid | None = None  # over (requests, 1): what a decoupled round takes beside the verify; None: nothing

    def requests(self, drafter: Footprint = NOTHING) -> int | None:
        """Return how many requests run at once beside this drafter; None: no bound."""
        return fitting(self.capacity_bytes, self.footprint, drafter)


@dataclass(frozen=True, kw_only=True)
class DrafterEngine:
    devices: int
    seconds: Grid  # over (requests, window): drafting `window` tokens for each
    capacity_bytes: float = float("inf")
    token_s: Grid | None = None
    """Over (requests, 1), measured in a process: from token to token of each (`decoupled.spec.Work`). Rounds then take
    what is there (`running`); None: they last until windows are (`ready`)."""


@dataclass(frozen=True, kw_only=True)
class DrafterOption:
    name: str
    survival: tuple[float, ...]  # P(the first j draft tokens are accepted), j = 1, 2, ..: bounds the window
    engines: tuple[DrafterEngine, ...] = ()  # none: it drafts on the engines' devices only
    footprint: Footprint = NOTHING

    def __post_init__(self) -> None:
        checked(self.survival)
        if self.name == OFF:
            raise PlanError(f"drafter: got the name {OFF!r}, which means plain decoding. Use another.")


def fitting(capacity_bytes: float, *footprints: Footprint) -> int | None:
    """Return how many requests' KV fits beside the weights; None: no bound."""
    left = capacity_bytes - sum(f.weights_bytes for f in footprints)
    each = sum(f.request_bytes for f in footprints)
    if left < 0:
        return 0
    return int(left / each) if isfinite(left) and each > 0 else None


@dataclass(frozen=True, kw_only=True)
class Candidates:
    verifiers: tuple[VerifierOption, ...]
    drafters: tuple[DrafterOption, ...]

    def drafter(self, name: str) -> DrafterOption | None:
        return next((d for d in self.drafters if d.name == name), None)


def from_table(table: CostTable, *, devices: int, survivals: Mapping[str, tuple[float, ...]]) -> Candidates:
    """Return a measured engine's options; nothing is refused for memory."""
    process, drafters = table.process, []
    for name, grid in table.drafters.items():
        alone = process is None and name not in TEXT_DRAFTERS
        own = (DrafterEngine(devices=devices, seconds=grid),) if alone else ()
        drafters.append(DrafterOption(name=name, survival=survivals[name], engines=own))
    if process is not None:
        engine = DrafterEngine(devices=1, seconds=_windows(process.token_s), token_s=process.token_s)
        drafters.append(DrafterOption(name=METHOD, survival=survivals[METHOD], engines=(engine,)))
    verifier = VerifierOption(devices=devices, costs=table, ahead_s=process.ahead_s if process else None)
    return Candidates(verifiers=(verifier,), drafters=tuple(drafters))


def _windows(token_s: Grid) -> Grid:
    windows = (1.0, MAX_WINDOW + 1.0)
    seconds = tuple(tuple(w * each for w in windows) for (each,) in token_s.seconds)
    return Grid(requests=token_s.requests, per_request=windows, seconds=seconds)


def coupled_tokens(survival: Sequence[float], window: int) -> float:
    return 1.0 + sum(survival[:window])


def ready(survival_BW: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return [B][W]: the share of rounds that have a window, where they last until windows are there.

    A request's window is there, or its drafter starts again from the commit, after a plain step.
    """
    # The position after the last one is accepted as often as the last.
    last_B, before_B = survival_BW[:, -1], survival_BW[:, -2] if survival_BW.shape[1] > 1 else 1.0
    beyond_B = np.divide(last_B * last_B, before_B, out=np.zeros_like(last_B), where=np.asarray(before_B) > 0)
    onward_BW = np.column_stack([survival_BW[:, 1:], beyond_B])
    returns_B = survival_BW[:, :1]
    total_BW = returns_B + 1.0 - onward_BW
    ready_BW: NDArray[np.float64] = np.divide(
        np.broadcast_to(returns_B, total_BW.shape), total_BW, out=np.ones_like(total_BW), where=total_BW > 0
    )
    return ready_BW


@dataclass(frozen=True, kw_only=True)
class Running:
    """Decoupled rounds of an engine that does not wait for its drafter, on average."""

    tokens: float  # emitted per round, of a request
    window: float  # draft tokens verified per round, of a request: those that are there, at most the window
    ready: float  # share of rounds, of a request, that verify any
    round_s: float


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Speeds that decide how many draft tokens are there in time."""

    requests: int  # of the verifier's rounds
    round_s: Grid  # of a verifier over (requests, rows per request), all that the engine does included
    token_s: float  # of the drafter from token to token of all requests that it serves
    message_s: float  # from the verifier to the drafter and back
    most: int  # draft tokens that it may be ahead of a commit, of a request


def running(survival: Sequence[float], window: int, pace: Pace) -> Running:
    """Return rounds that verify what is there at their beginning.

    A request has draft tokens in stock beyond the commit, or it is lost: the commit is not what was drafted, and its
    round is a plain step. To draft again the drafter has that round, less a message both ways and the rest of its step.
    """
    checked(survival)
    assert 1 <= window <= len(survival), window
    assert pace.token_s > 0, pace
    assert pace.most >= 1, pace
    low_s, high_s = 0.0, float("inf")
    round_s = pace.round_s.at(pace.requests, 1.0)
    for _ in range(50):
        afresh = max(0.0, round_s - pace.message_s) / pace.token_s
        drafted = round_s / pace.token_s
        windows_K = there(survival, window, drafted=drafted, afresh=afresh, most=pace.most)
        found_s = _mean_round_s(pace, windows_K)
        if abs(found_s - round_s) <= 1e-4 * round_s:
            break
        # Longer rounds have more rows, which make them longer: one is between those too short and those too long.
        low_s, high_s = (round_s, high_s) if found_s > round_s else (low_s, round_s)
        round_s = found_s if low_s < found_s < high_s else (low_s + high_s) / 2
    return Running(
        tokens=1.0 + float(windows_K[1:] @ np.cumsum(survival[:window])),
        window=float(windows_K @ np.arange(window + 1)),
        ready=float(1.0 - windows_K[0]),
        round_s=found_s,
    )


def there(survival: Sequence[float], window: int, *, drafted: float, afresh: float, most: int) -> NDArray[np.float64]:
    """Return [window + 1]: how often a round of `running` verifies so many tokens, by a Markov chain of what a request
    has in stock: 0, 1, .., most tokens, or it is lost.

    Args:
        drafted: tokens per request and round.
        afresh: those after a commit that was not drafted.
        most: tokens ahead of a commit.
    """
    onward = survival[window] if len(survival) > window else _next(survival[:window])
    goes_on_K = (*survival[:window], onward)  # P(k draft tokens and the one after them are right)
    returns = survival[0]  # P(the first token is right | the last was not): as after any
    lost = most + 1
    moves_SS = np.zeros((most + 2, most + 2))
    for stock in range(most + 1):
        k = min(window, stock)
        for tokens, share in _whole(drafted):
            after = min(most, stock + tokens) - (k + 1)
            moves_SS[stock, max(0, after)] += goes_on_K[k] * share
        moves_SS[stock, lost] += 1.0 - goes_on_K[k]
    moves_SS[lost, lost] += 1.0 - returns
    for tokens, share in _begun(afresh):
        moves_SS[lost, min(most, tokens) - 1 if tokens else lost] += returns * share
    share_S = _stationary(moves_SS)
    windows_K = np.zeros(window + 1)
    np.add.at(windows_K, np.minimum(np.arange(most + 1), window), share_S[:-1])
    windows_K[0] += share_S[-1]
    return windows_K


def _next(survival: Sequence[float]) -> float:
    last, before = survival[-1], survival[-2] if len(survival) > 1 else 1.0
    return last * last / before if before > 0 else 0.0


def _whole(tokens: float) -> tuple[tuple[int, float], ...]:
    """Return (whole tokens, share) with that mean."""
    least = floor(min(tokens, 1e9))
    return ((least, 1.0 - (tokens - least)), (least + 1, tokens - least)) if tokens < 1e9 else ((least, 1.0),)


def _begun(tokens: float) -> tuple[tuple[int, float], ...]:
    """Return floor(tokens - U), U in 0..1, likewise: the time began within a step, which is of no use."""
    return tuple((max(0, whole - 1), share) for whole, share in _whole(tokens))


def _stationary(moves_SS: NDArray[np.float64]) -> NDArray[np.float64]:
    states = len(moves_SS)
    equations = np.vstack([moves_SS.T - np.eye(states), np.ones(states)])
    share_S: NDArray[np.float64] = np.linalg.lstsq(equations, np.append(np.zeros(states), 1.0), rcond=None)[0]
    share_S = share_S.clip(0.0)
    share_S /= share_S.sum()
    return share_S


def _mean_round_s(pace: Pace, windows_K: NDArray[np.float64]) -> float:
    """Average over all sums of requests' independent windows."""
    size = pace.requests * (len(windows_K) - 1) + 1
    sums = np.fft.irfft(np.fft.rfft(windows_K, 2 * size) ** pace.requests, 2 * size)[:size].clip(0.0)
    seconds = pace.round_s.along(pace.requests, 1.0 + np.arange(size) / pace.requests)
    return float(sums @ seconds / sums.sum())
