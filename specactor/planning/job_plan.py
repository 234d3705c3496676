"""The plan of a whole job, searched once at its start (Algorithm 1 of 2511.16193, `search`). PURE.

Planned are the beginning of a rollout, with all requests at once, and its end, with one. Engines choose windows by the
same costs and beliefs, and follow what they see; so of the plan it is applied who drafts at all.

Invariants: what is applied changes the speed and never a token; equal input gives equal plans on all ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specactor.config import Config
from specactor.planning.plans import Cluster, RolloutPlan, from_table
from specactor.planning.search import search
from specactor.rollout import cost_file
from specactor.rollout.speculation.acceptance import AcceptanceModel
from specactor.rollout.speculation.costs import METHOD, CostTable

if TYPE_CHECKING:  # plans need no torch
    from specactor.parallel.collective import Collective


def shared_table(file: str, ranks: Collective) -> CostTable:
    """Read the table on rank 0 alone: hosts whose files differ would make different plans of one job."""
    text = ranks.together("cost table", lambda: cost_file.read(file).to_json() if ranks.rank == 0 else "")
    return CostTable.from_json(ranks.gather(text, str)[0])


def planned(config: Config, table: CostTable, *, machines: int) -> tuple[Config, str]:
    """The configuration without the drafting that no plan has, and what to tell about it."""
    rollout, speculation = config.rollout, config.rollout.speculation
    if missing := [name for name in speculation.draft_methods if name not in table.methods]:
        return config, f"no plan: {speculation.cost_table} lacks {', '.join(missing)}. Measure: specactor profile."
    first, last = (_fastest(config, table, n, machines) for n in (rollout.prompts_per_step * rollout.group_size, 1))
    text = f"plan: {_described(first)}; for the last request {_described(last)}"
    modes = {first.mode, last.mode}
    others = tuple(name for name in speculation.drafters if name != METHOD)
    if config.distillation.refresh != "off":
        return config, text  # the draft model learns, and what it will be worth is not known yet
    if modes == {"off"}:
        speculation = replace(speculation, mode="off")
    elif "decoupled" not in modes and others:
        # Engines load the draft model that is named, so none is where only text is drafted from.
        model = "" if set(others) == {"suffix"} else speculation.draft_model
        speculation = replace(speculation, drafters=others, draft_model=model)
    parallel = config.parallel
    if rollout.speculation.is_decoupled and not speculation.is_decoupled:
        parallel = replace(parallel, drafters=0, drafter_hosts=(), drafter_network="")
        text += "; no drafter process is started"
    return replace(config, parallel=parallel, rollout=replace(rollout, speculation=speculation)), text


def _fastest(config: Config, table: CostTable, requests: int, machines: int) -> RolloutPlan:
    """Of the job's engines and drafters, in any layout of their devices."""
    parallel, speculation = config.parallel, config.rollout.speculation
    # Nobody has seen these drafters yet: believed is what their engines begin with.
    model = AcceptanceModel(max_window=speculation.largest_window)
    survival = tuple(model.survivals([""], covered=False)[0].tolist())
    table = table.only(speculation.draft_methods)
    options = from_table(table, devices=parallel.engine_tensor, survivals=dict.fromkeys(table.methods, survival))
    drafters = [o if METHOD in table.methods else replace(o, engines=()) for o in options.drafters]
    own = parallel.drafters * (len(parallel.drafter_hosts) or machines)
    cluster = Cluster(devices=parallel.engines * parallel.engine_tensor + own, requests=requests)
    return search(cluster, options.verifiers, drafters, max_window=speculation.largest_window)[0]


def _described(plan: RolloutPlan) -> str:
    if plan.mode == "off":
        return f"off on {plan.verifiers.engines} engines"
    beside = f" and {plan.drafters.engines} drafters" if plan.drafters.engines else ""
    how = f"{plan.mode} {plan.draft.drafter}, window {plan.window}, on {plan.verifiers.engines} engines{beside}"
    return f"{how}, {plan.speedup:.2f} times as fast as off"
