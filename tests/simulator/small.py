"""A small cluster with linear costs: what it can run, what is true, and requests."""

from __future__ import annotations

from collections.abc import Mapping

from specactor.planning.plans import Candidates, Cluster, DrafterEngine, DrafterOption, VerifierOption
from specactor.rollout.speculation.acceptance import survival_of
from specactor.rollout.speculation.costs import CostTable, Grid
from specactor.simulator.requests import Lengths, Method, Requests, World, draw

W = 4
AXIS = (1.0, 64.0)
NO_DELAYS = {"start_s": 0.0, "replan_s": 0.0, "rollback_s": 0.0}


def table(base_s: float = 0.010, row_s: float = 0.0002, step_s: float = 0.001, *, local: bool = True) -> CostTable:
    """A forward: base + rows x row_s. Draft steps: step_s each."""
    verify = Grid(
        requests=AXIS,
        per_request=(1.0, 9.0),
        seconds=tuple(tuple(base_s + n * k * row_s for k in (1.0, 9.0)) for n in AXIS),
    )
    return CostTable(
        model="m",
        device="d",
        date="",
        verify=verify,
        plain=Grid(requests=AXIS, per_request=(1.0,), seconds=tuple((verify.at(n, 1.0),) for n in AXIS)),
        drafters={name: drafting(step_s) for name in ("large", "small")} if local else {},
    )


def drafting(step_s: float, request_s: float = 1e-5) -> Grid:
    return Grid(
        requests=AXIS,
        per_request=(1.0, 9.0),
        seconds=tuple(tuple(w * (step_s + n * request_s) for w in (1.0, 9.0)) for n in AXIS),
    )


def candidates(p: float = 0.6, *, step_s: float = 0.001, base_s: float = 0.010, local: bool = True) -> Candidates:
    """Verifiers of 2 devices; two drafters of 1, of which `large` is right a little more often, and slower."""
    rates = {"large": min(1.0, p * 1.1), "small": p}
    return Candidates(
        verifiers=(VerifierOption(devices=2, costs=table(base_s, step_s=step_s, local=local)),),
        drafters=tuple(
            DrafterOption(
                name=name,
                survival=survival_of(rate, W + 1),
                engines=(DrafterEngine(devices=1, seconds=drafting(step_s * (2 if name == "large" else 1))),),
            )
            for name, rate in rates.items()
        ),
    )


def world(p: float = 0.6, *, delays: Mapping[str, float] = NO_DELAYS, **more: float) -> World:
    """Where drafters are right as often as `candidates(p)` believes."""
    methods = {
        "large": Method(rate=min(1.0, p * 1.1), decay=1.0, **more),
        "small": Method(rate=p, decay=1.0, **more),
    }
    return World(methods=methods, **delays)


def requests(prompts: int = 8, group_size: int = 4, *, seed: int = 0, median: float = 300.0) -> Requests:
    return draw(Lengths(median=median, sigma=0.8, longest=2000), prompts=prompts, group_size=group_size, seed=(seed,))


def cluster(of: Requests, devices: int = 8) -> Cluster:
    return Cluster(devices=devices, requests=len(of), message_s=1e-4)
