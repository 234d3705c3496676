"""What a plan of a rollout is, and the options that `search` makes it from. PURE: values, checked when made.

Sizes are bytes, times seconds, counts devices, engines, requests or tokens.

Invariants: a window of 0 means plain decoding and nothing else does; no count, time or probability is out of range.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from specactor.config import MAX_WINDOW
from specactor.errors import PlanError
from specactor.rollout.speculation.acceptance import checked
from specactor.rollout.speculation.costs import METHOD, CostTable, Grid
from specactor.rollout.speculation.reconfiguration import DraftPlan, Mode
from specactor.rollout.speculation.windows import OFF

TEXT_DRAFTERS = ("suffix",)  # they look things up on the host, where the verifier is


@dataclass(frozen=True, kw_only=True)
class Placement:
    engines: int
    devices_each: int

    @property
    def devices(self) -> int:
        return self.engines * self.devices_each


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """A plan says where a rollout runs, how it drafts, and what is predicted."""

    draft: DraftPlan  # of every request, to begin with
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

    @property
    def mode(self) -> Mode:
        return self.draft.mode

    @property
    def window(self) -> int:
        return self.draft.window


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
    """Over (requests, 1), measured in a drafter process: from token to token of each, its loop and messages included
    (`decoupled.spec.Work`). Rounds then take what is there (`running`); None: they last until windows are
    (`pipelined`)."""


@dataclass(frozen=True, kw_only=True)
class DrafterOption:
    name: str
    survival: tuple[float, ...]  # P(the first j draft tokens are accepted), j = 1, 2, ..: bounds the window
    engines: tuple[DrafterEngine, ...] = ()  # none: it drafts on the verifiers' devices only
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
    """Return the options of a measured table, of an engine on `devices` devices. Nothing is refused for memory."""
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
    """Return the grid of drafting windows, token by token."""
    windows = (1.0, MAX_WINDOW + 1.0)
    seconds = tuple(tuple(w * each for w in windows) for (each,) in token_s.seconds)
    return Grid(requests=token_s.requests, per_request=windows, seconds=seconds)
