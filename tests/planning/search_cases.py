"""Clusters with verifiers and drafters whose costs are linear: what the search is asked about."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from hypothesis import strategies as st

from specactor.planning.plans import Cluster, DrafterEngine, DrafterOption, VerifierOption
from specactor.rollout.speculation.acceptance import survival_of
from specactor.rollout.speculation.costs import CostTable, Grid

AXIS = (1.0, 64.0)
W = 4


def linear(
    base_s: float, per_request_s: float, per_token_s: float, per_request: tuple[float, ...] = (1.0, 9.0)
) -> Grid:
    """Seconds: base + requests x (per_request + tokens x per_token)."""
    return Grid(
        requests=AXIS,
        per_request=per_request,
        seconds=tuple(tuple(base_s + n * (per_request_s + k * per_token_s) for k in per_request) for n in AXIS),
    )


def drafting(base_s: float, per_request_s: float) -> Grid:
    """Seconds: window x (base + requests x per_request)."""
    return Grid(
        requests=AXIS,
        per_request=(1.0, 9.0),
        seconds=tuple(tuple(w * (base_s + n * per_request_s) for w in (1.0, 9.0)) for n in AXIS),
    )


def verifier(
    devices: int = 1, verify: Grid | None = None, coupled: Grid | None = None, **more: object
) -> VerifierOption:
    verify = verify or linear(0.010, 0.0, 0.0002)
    return VerifierOption(
        devices=devices,
        costs=CostTable(
            model="m",
            device="d",
            date="",
            verify=verify,
            plain=Grid(requests=AXIS, per_request=(1.0,), seconds=tuple((verify.at(n, 1.0),) for n in AXIS)),
            drafters={} if coupled is None else {"small": coupled},
        ),
        **more,  # type: ignore[arg-type]
    )


def drafter(p: float, own: Grid | None = None, devices: int = 1, **more: object) -> DrafterOption:
    engines = () if own is None else (DrafterEngine(devices=devices, seconds=own),)
    return DrafterOption(name="small", survival=survival_of(p, W + 1), engines=engines, **more)  # type: ignore[arg-type]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Cluster, list[VerifierOption], DrafterOption]:
    """A small cluster, two sizes of verifiers, a drafter that can draft in both ways; linear costs."""
    seconds = st.floats(1e-4, 0.02)
    cluster = Cluster(devices=draw(st.integers(4, 12)), requests=draw(st.integers(1, 40)), message_s=draw(seconds))
    verifiers = [
        verifier(g, linear(draw(seconds), draw(seconds) / 50, draw(seconds) / 50), drafting(draw(seconds), 1e-5))
        for g in (1, 2)
    ]
    survival = tuple(accumulate(draw(st.lists(st.floats(0, 1), min_size=W + 1, max_size=W + 1)), mul))
    own = DrafterEngine(devices=draw(st.sampled_from([1, 2])), seconds=drafting(draw(seconds), draw(seconds) / 50))
    return cluster, verifiers, DrafterOption(name="small", survival=survival, engines=(own,))


Case = tuple[Cluster, list[VerifierOption], DrafterOption]
