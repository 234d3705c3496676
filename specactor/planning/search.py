"""Which devices verify, which draft, with what window: a search over all plans. PURE.

Invariants: no plan exceeds the devices; off wins ties; a drafter with acceptance 0 is never in the first plan; rising
survivals never lower its speed, but for rows that cost more than they bring.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, isfinite
from typing import TYPE_CHECKING

import numpy as np

from specactor.config import Config
from specactor.config.speculation import MTP, kind_of
from specactor.errors import PlanError
from specactor.planning.plans import (
    Cluster,
    DrafterEngine,
    DrafterOption,
    Mode,
    Pace,
    Placement,
    RolloutPlan,
    VerifierOption,
    coupled_tokens,
    fitting,
    from_table,
    ready,
    running,
)
from specactor.rollout.decoupled.protocol import AHEAD
from specactor.rollout.speculation.acceptance import AcceptanceModel
from specactor.rollout.speculation.costs import METHOD, CostTable, Grid
from specactor.rollout.speculation.windows import OFF

if TYPE_CHECKING:  # plans need no torch
    from specactor.parallel.collective import Collective


NOBODY = Placement(engines=0, devices_each=0)


def search(
    cluster: Cluster,
    verifiers: Sequence[VerifierOption],
    drafters: Sequence[DrafterOption] = (),
    *,
    max_window: int = 16,
) -> list[RolloutPlan]:
    """Return the best plan of every mode, drafter and pair of engine sizes, fastest first. Raises PlanError where the
    target fits nowhere."""
    found = [_off(cluster, v) for v in verifiers if v.devices <= cluster.devices and v.requests() != 0]
    if not found:
        raise PlanError(
            f"cluster: got {cluster.devices} devices, verifiers of {sorted(v.devices for v in verifiers)}; expected "
            "one that fits, with memory for its weights and a request. Use more devices, or a shorter context."
        )
    plain = max(plan.tokens_per_s for plan in found)
    for verifier in (v for v in verifiers if v.devices <= cluster.devices):
        for drafter in drafters:
            largest = min(max_window, len(drafter.survival))
            if drafter.name in verifier.costs.drafters:
                found += _best(_coupled(cluster, verifier, drafter, w) for w in range(1, largest + 1))
            for engine in drafter.engines:
                found += _decoupled(cluster, verifier, drafter, engine, largest)
    found = [replace(plan, speedup=plan.tokens_per_s / plain) for plan in found]
    return sorted(found, key=lambda plan: (-plan.tokens_per_s, plan.mode != "off", *_order(plan)))


@dataclass(frozen=True, kw_only=True)
class _Verifying:
    cluster: Cluster
    option: VerifierOption
    engines: int
    requests: int  # at once on each; more wait where there is no memory for them

    @classmethod
    def of(cls, cluster: Cluster, option: VerifierOption, engines: int, fit: int | None) -> _Verifying:
        each = ceil(cluster.requests / engines)
        return cls(cluster=cluster, option=option, engines=engines, requests=each if fit is None else min(each, fit))

    @property
    def running(self) -> int:
        return min(self.cluster.requests, self.engines * self.requests)

    def plan(
        self,
        mode: Mode,
        drafter: str,
        window: int,
        *,
        round_s: float,
        tokens: float,
        reason: str,
        drafters: Placement = NOBODY,
    ) -> RolloutPlan:
        tokens_per_s = self.running * tokens / round_s
        assert isfinite(tokens_per_s)
        return RolloutPlan(
            mode=mode,
            drafter=drafter,
            window=window,
            verifiers=Placement(engines=self.engines, devices_each=self.option.devices),
            drafters=drafters,
            idle_devices=self.cluster.devices - self.engines * self.option.devices - drafters.devices,
            requests_per_engine=self.requests,
            round_s=round_s,
            tokens_per_round=tokens,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_device=tokens_per_s / self.cluster.devices,
            reason=f"{reason}; more requests wait" if self.running < self.cluster.requests else reason,
        )


def _off(cluster: Cluster, option: VerifierOption) -> RolloutPlan:
    of = _Verifying.of(cluster, option, cluster.devices // option.devices, option.requests())
    seconds = option.costs.plain_s(of.requests)
    reason = f"1 token per {1e3 * seconds:.2f} ms step of {of.requests} requests"
    return of.plan("off", OFF, 0, round_s=seconds, tokens=1.0, reason=reason)


def _coupled(cluster: Cluster, option: VerifierOption, drafter: DrafterOption, window: int) -> RolloutPlan | None:
    fit = option.requests(drafter.footprint)
    tokens = coupled_tokens(drafter.survival, window)
    if fit == 0 or tokens <= 1.0:
        return None
    of = _Verifying.of(cluster, option, cluster.devices // option.devices, fit)
    verify_s = option.costs.verify_s(of.requests, of.requests * (1 + window))
    draft_s = option.costs.draft_s(drafter.name, of.requests, window)
    return of.plan(
        "coupled",
        drafter.name,
        window,
        round_s=verify_s + draft_s,
        tokens=tokens,
        reason=f"{tokens:.2f} tokens per round of {1e3 * verify_s:.2f} ms verify + {1e3 * draft_s:.2f} ms draft",
    )


def _decoupled(
    cluster: Cluster, option: VerifierOption, drafter: DrafterOption, engine: DrafterEngine, max_window: int
) -> list[RolloutPlan]:
    """Return the best plan, if any, with the fewest drafters needed. Every number of verifiers is tried with as many
    drafters as fit, and Algorithm 1's 1:1 groups (2511.16193)."""
    fit = option.requests()
    if fit == 0 or drafter.survival[0] <= 0.0:
        return []
    groups = cluster.devices // (option.devices + engine.devices)
    pairs = {(n, (cluster.devices - n * option.devices) // engine.devices) for n in range(1, cluster.devices + 1)}
    found: list[RolloutPlan] = []
    for verifying, drafting in sorted(pairs | {(groups, groups)}):
        if verifying > 0 and drafting > 0:
            of = _Verifying.of(cluster, option, verifying, fit)
            found += _best(_pair(of, drafter, engine, drafting, w, max_window) for w in range(1, max_window + 1))
    if not found:
        return []
    best = min(found, key=_order)
    of = _Verifying.of(cluster, option, best.verifiers.engines, fit)
    slower, as_fast = 0, best.drafters.engines
    while as_fast - slower > 1:
        middle = (slower + as_fast) // 2
        plan = _pair(of, drafter, engine, middle, best.window, max_window)
        if plan is not None and plan.tokens_per_s >= best.tokens_per_s:
            best, as_fast = plan, middle
        else:
            slower = middle
    return [best]


def _pair(
    of: _Verifying, drafter: DrafterOption, engine: DrafterEngine, drafting: int, window: int, max_window: int
) -> RolloutPlan | None:
    """Return None where they do not fit, or nothing would be accepted."""
    served = ceil(of.running / drafting)
    fit = fitting(engine.capacity_bytes, drafter.footprint)
    if fit is not None and served > fit:
        return None
    if engine.token_s is None:
        share, tokens, round_s, why = _lasting(of, drafter, engine, served, window)
    else:
        token_s = engine.token_s.at(served, 1.0)
        share, tokens, round_s, why = _running(of, drafter, token_s, window, most=AHEAD * max_window)
    if tokens <= 1.0:
        return None
    return of.plan(
        "decoupled",
        drafter.name,
        window,
        round_s=round_s,
        tokens=tokens,
        reason=f"{tokens:.2f} tokens per {1e3 * round_s:.2f} ms round {why}; windows in {share:.0%} of rounds, "
        f"{served} requests per drafter",
        drafters=Placement(engines=drafting, devices_each=engine.devices),
    )


def _lasting(
    of: _Verifying, drafter: DrafterOption, engine: DrafterEngine, served: int, window: int
) -> tuple[float, float, float, str]:
    """Return (share of rounds with a window, tokens per round, seconds, why) of rounds that wait."""
    draft_s = engine.seconds.at(served, window + 1) + of.cluster.message_s
    share = _ready(drafter.survival)[window - 1]
    tokens = 1.0 + share * (coupled_tokens(drafter.survival, window) - 1.0)
    verify_s = _round_s(of).at(of.requests, 1.0 + share * window)
    bound = "bound by drafting" if draft_s >= verify_s else "bound by verifying"
    return share, tokens, max(verify_s, draft_s), bound


@lru_cache  # a search asks for few survivals, thousands of times
def _ready(survival: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(ready(np.array([survival]))[0].tolist())


def _running(
    of: _Verifying, drafter: DrafterOption, token_s: float, window: int, *, most: int
) -> tuple[float, float, float, str]:
    """Return the same of rounds that take what is there."""
    pace = Pace(requests=of.requests, round_s=_round_s(of), token_s=token_s, message_s=of.cluster.message_s, most=most)
    found = running(drafter.survival, window, pace)
    drafted = f"in which {found.round_s / token_s:.1f} tokens are drafted and {found.window:.1f} verified"
    return found.ready, found.tokens, found.round_s, drafted


def _round_s(of: _Verifying) -> Grid:
    grid = of.option.costs.verify
    more = of.option.ahead_s.at(of.requests, 1.0) if of.option.ahead_s else 0.0
    return replace(grid, seconds=tuple(tuple(s + more for s in row) for row in grid.seconds)) if more else grid


def _order(plan: RolloutPlan) -> tuple[float, int, int]:
    return (-plan.tokens_per_s, plan.verifiers.devices + plan.drafters.devices, plan.window)


def _best(plans: Iterable[RolloutPlan | None]) -> list[RolloutPlan]:
    there = [plan for plan in plans if plan is not None]
    return [min(there, key=_order)] if there else []


def shared_table(file: str, ranks: Collective) -> CostTable:
    """Return rank 0's table: hosts with other files would plan differently."""
    text = ranks.together("cost table", lambda: CostTable.read(file).to_json() if ranks.rank == 0 else "")
    return CostTable.from_json(ranks.gather(text, str)[0])


def planned(config: Config, table: CostTable, *, machines: int) -> tuple[Config, str]:
    """Return the configuration without drafting that no plan has, and a line about it."""
    rollout, speculation = config.rollout, config.rollout.speculation
    if missing := [name for name in speculation.draft_methods if name not in table.methods]:
        return config, f"no plan: {speculation.cost_table} lacks {', '.join(missing)}. Measure: specactor profile."
    many, one = (_plans(config, table, n, machines) for n in (rollout.prompts_per_step * rollout.group_size, 1))
    text = f"plan: {_described(many[0])}; for the last request {_described(one[0])}"
    others = tuple(name for name in speculation.drafters if name != METHOD)
    if config.drafter_learns:
        return config, text  # the draft model learns, and what it will be worth is not known yet
    if many[0].mode == one[0].mode == "off":
        speculation = replace(speculation, mode="off")
    elif others and not (_takes_processes(many) or _takes_processes(one)):
        speculation = replace(speculation, drafters=others)
    parallel = config.parallel
    if rollout.speculation.is_decoupled and not speculation.is_decoupled:
        parallel = replace(parallel, drafters=0, drafter_hosts=())
        text += "; no drafter process is started"
    return replace(config, parallel=parallel, rollout=replace(rollout, speculation=speculation)), text


def _plans(config: Config, table: CostTable, requests: int, machines: int) -> list[RolloutPlan]:
    """Return each way to draft on the engines and drafters that are configured, fastest first; off wins ties."""
    parallel, speculation = config.parallel, config.rollout.speculation
    # Nobody has seen these drafters yet: believed is what their engines begin with.
    model = AcceptanceModel(max_window=speculation.largest_window)
    survival = tuple(model.survivals([""], covered=False)[0].tolist())
    table = table.only(speculation.draft_methods)
    options = from_table(table, devices=parallel.engine_tensor, survivals=dict.fromkeys(table.methods, survival))
    (verifier,), windows = options.verifiers, range(1, len(survival) + 1)
    cluster = Cluster(devices=parallel.engines * parallel.engine_tensor, requests=requests)
    # Without devices of their own they draft on those of engines that have no request.
    busy = min(parallel.engines, requests)
    drafting = parallel.drafters * (len(parallel.drafter_hosts) or machines) or parallel.engines - busy
    of = _Verifying.of(replace(cluster, devices=cluster.devices + drafting), verifier, busy, None)
    off = _off(cluster, verifier)
    found = [off]
    for drafter in options.drafters:
        if drafter.name in table.drafters:
            found += _best(_coupled(cluster, verifier, drafter, window) for window in windows)
        elif drafting:
            (engine,) = drafter.engines
            found += _best(_pair(of, drafter, engine, drafting, window, len(windows)) for window in windows)
    found = [replace(plan, speedup=plan.tokens_per_s / off.tokens_per_s) for plan in found]
    return sorted(found, key=lambda plan: (-plan.tokens_per_s, plan.mode != "off"))


def _takes_processes(plans: Sequence[RolloutPlan]) -> bool:
    """Return whether drafter processes are faster than plain decoding, and than draft models in engines."""
    # Texts may repeat or not, which nobody knows before: what drafts over them takes no process away.
    models = (plan for plan in plans if kind_of(plan.drafter) or plan.drafter in (OFF, MTP))
    return next(models).mode == "decoupled"


def _described(plan: RolloutPlan) -> str:
    if plan.mode == "off":
        return f"off on {plan.verifiers.engines} engines"
    beside = f" and {plan.drafters.engines} drafters" if plan.drafters.engines else ""
    how = f"{plan.mode} {plan.drafter}, window {plan.window}, on {plan.verifiers.engines} engines{beside}"
    return f"{how}, {plan.speedup:.2f} times as fast as off"
