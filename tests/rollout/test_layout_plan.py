"""Which engines serve and which draft: only where drafters elsewhere are predicted to pay, and never nobody serves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor.config import RolloutConfig, SpeculationConfig, TailConfig
from specactor.rollout.draft.counts import PRIOR_DRAFTS, Counts
from specactor.rollout.layout_plan import MARGIN, Layout, LayoutPlanner, layout_planner
from specactor.rollout.planning.candidates import from_table
from specactor.rollout.planning.costs import CostTable, Grid, ProcessCosts
from specactor.rollout.planning.plans import Cluster
from specactor.rollout.planning.rounds import survival_of
from specactor.rollout.planning.search import search

W = 4
AXIS = (1.0, 64.0)


def grid(at_one: float, at_64: float) -> Grid:
    return Grid(requests=AXIS, per_request=(1.0,), seconds=((at_one,), (at_64,)))


def table(base_s: float = 0.010, row_s: float = 1e-5, token_s: float = 0.001, ahead_s: float = 1e-4) -> CostTable:
    """Rounds that hardly depend on their rows, so half of the engines do as well as all; and a quick drafter."""
    rows = tuple(tuple(base_s + n * k * row_s for k in (1.0, 9.0)) for n in AXIS)
    return CostTable(
        model="m",
        device="d",
        date="",
        verify=Grid(requests=AXIS, per_request=(1.0, 9.0), seconds=rows),
        plain=grid(rows[0][0], rows[1][0]),
        drafters={"suffix": grid(1e-4, 1e-4)},
        process=ProcessCosts(token_s=grid(token_s, token_s), ahead_s=grid(ahead_s, ahead_s)),
    )


def planner(costs: CostTable | None = None, *, p: float = 0.9, suffix: float = 0.3, **more: object) -> LayoutPlanner:
    fields: dict[str, object] = {
        "table": costs or table(),
        "methods": ("suffix", "decoupled"),
        "slots": 64,
        "max_window": W,
        "acceptance": {"decoupled": p, "suffix": suffix},
        "response_tokens": 1000.0,
    }
    return LayoutPlanner(**{**fields, **more})  # type: ignore[arg-type]


def seen(drafted: int, accepted: int) -> Counts:
    counts = Counts()
    counts.drafted_at[0], counts.accepted_at[0] = drafted, accepted
    return counts


def test_half_of_the_engines_serve_where_drafters_elsewhere_win() -> None:
    layout = planner().layout([0.1, 0.1], groups=4, requests=16)
    assert (layout.serving, layout.drafting) == ((0,), (1,))
    assert "times as fast as all: " in layout.reason
    assert "tokens per" in layout.reason


@pytest.mark.parametrize(
    ("changed", "wakes_s", "groups"),
    [
        (planner(p=0.1), [0.1, 0.1], 4),
        (planner(suffix=0.95), [0.1, 0.1], 4),
        (planner(table(token_s=0.02)), [0.1, 0.1], 4),
        (planner(table(row_s=2e-3)), [0.1, 0.1], 4),
        (planner(table(ahead_s=0.05)), [0.1, 0.1], 4),
        (planner(replace(table(), process=None)), [0.1, 0.1], 4),
        (planner(methods=("suffix",)), [0.1, 0.1], 4),
        (planner(slots=2), [0.1, 0.1], 4),
        (planner(acceptance={}), [0.1, 0.1], 4),
        (planner(response_tokens=0.0), [0.1, 0.1], 4),
        (planner(), [None, None], 4),
        (planner(), [20.0, 20.0], 4),
        (planner(), [0.1, 0.1], 1),
        (planner(), [0.1], 4),
    ],
    ids=[
        "bad drafts",
        "good text",
        "slow drafter",
        "dear rows",
        "dear rounds",
        "no process",
        "another method",
        "few slots",
        "nothing seen",
        "no lengths",
        "nobody sleeps",
        "long wake",
        "one group",
        "one engine",
    ],
)
def test_else_all_serve(changed: LayoutPlanner, wakes_s: list[float | None], groups: int) -> None:
    layout = changed.layout(wakes_s, groups=groups, requests=16)
    assert (layout.serving, layout.drafting) == (tuple(range(len(wakes_s))), ())


def test_an_engine_without_a_sleeping_drafter_serves() -> None:
    assert planner().layout([0.1, None], groups=4, requests=16).serving == (1,)
    assert planner().layout([0.3, 0.1, None], groups=4, requests=16).drafting == (1,)


def test_a_model_in_the_engine_tells_how_good_a_process_with_it_will_be() -> None:
    methods = ("model", "decoupled")
    both = planner(methods=methods, acceptance={})
    assert not both.layout([0.1, 0.1], groups=4, requests=16).drafting
    assert both.after({"model": seen(1000, 900)}).layout([0.1, 0.1], groups=4, requests=16).drafting
    own = both.after({"model": seen(1000, 900), "decoupled": seen(1000, 100)})
    assert not own.layout([0.1, 0.1], groups=4, requests=16).drafting, "what it did itself counts"


def test_what_was_seen_is_believed_and_what_was_not_is_kept() -> None:
    first = planner(acceptance={}).after({"decoupled": seen(PRIOR_DRAFTS, PRIOR_DRAFTS)})
    assert first.acceptance == {"decoupled": 0.5, "suffix": 0.0}
    again = first.after({"suffix": seen(9 * PRIOR_DRAFTS, 4 * PRIOR_DRAFTS)})
    assert again.acceptance == {"decoupled": 0.5, "suffix": 0.4}
    assert again.after({"decoupled": seen(10**9, 0)}).acceptance["decoupled"] == pytest.approx(0.0, abs=1e-6)


def test_a_run_asks_for_it_with_a_drafter_process_in_its_table() -> None:
    auto = SpeculationConfig(
        mode="auto", drafters=("suffix", "decoupled"), draft_model="there", max_window=W, cost_table="there"
    )
    config = RolloutConfig(speculation=auto, tail=TailConfig(drafters=True))
    asked = layout_planner(config, table())
    assert asked == replace(planner(), acceptance={}, response_tokens=0.0, slots=config.engine.max_running_requests)
    assert layout_planner(config, None) is None
    assert layout_planner(config, replace(table(), process=None)) is None
    assert layout_planner(replace(config, tail=TailConfig()), table()) is None
    assert layout_planner(replace(config, speculation=replace(auto, cost_table="")), table()) is None
    more = replace(auto, drafters=(*auto.drafters, "model"))
    assert layout_planner(replace(config, speculation=more), table()) is None, "all engines with it may be faster"
    assert layout_planner(replace(config, speculation=replace(auto, mode="decoupled")), table()) is None


def wrong(layout: Layout, by: LayoutPlanner, wakes_s: list[float | None], requests: int) -> str:
    """What a layout breaks, by figures of the search alone; empty if nothing."""
    engines = range(len(wakes_s))
    if not layout.serving:
        return "nobody serves"
    if len({*layout.serving, *layout.drafting}) != len(layout.serving) + len(layout.drafting):
        return "an engine serves and drafts"
    if not {*layout.serving, *layout.drafting} <= {*engines}:
        return "there is no such engine"
    if not layout.drafting:
        return "" if len(layout.serving) == len(engines) else "an engine is idle for nothing"
    waits = [wakes_s[engine] for engine in layout.drafting]
    if None in waits:
        return "a drafter does not sleep"
    options = from_table(by.table, devices=1, survivals={m: survival_of(p, W + 1) for m, p in by.acceptance.items()})
    slots = by.slots * len(layout.serving)

    def tokens_per_s(devices: int, mode: str) -> float:
        plans = search(Cluster(devices=devices, requests=requests), options.verifiers, options.drafters, max_window=W)
        return max((p.tokens_per_s for p in plans if (p.mode == "decoupled") == (mode == "decoupled")), default=0.0)

    if requests > slots:
        return ""  # then it is a matter of waiting, too, which these figures do not have
    tokens = requests * by.response_tokens
    apart_s = tokens / tokens_per_s(len(engines), "decoupled") + max(s for s in waits if s is not None)
    return "it is slower" if tokens / tokens_per_s(len(engines), "off") < 1.1 * apart_s else ""


CASES = {
    "base_s": st.floats(1e-3, 0.05),
    "row_s": st.floats(1e-6, 2e-4),
    "token_s": st.floats(1e-4, 5e-3),
    "p": st.floats(0.3, 0.99),
    "suffix": st.floats(0.0, 0.99),
    "wakes_s": st.lists(st.none() | st.floats(0.0, 1.0), min_size=1, max_size=4),
    "requests": st.integers(1, 48),
    "slots": st.integers(1, 64),
}


def laid_out(
    margin: float, base_s: float, row_s: float, token_s: float, p: float, suffix: float, slots: int, **case: object
) -> tuple[Layout, str]:
    by = planner(table(base_s, row_s, token_s), p=p, suffix=suffix, slots=slots, margin=margin)
    wakes_s: list[float | None] = case["wakes_s"]  # type: ignore[assignment]
    requests: int = case["requests"]  # type: ignore[assignment]
    layout = by.layout(wakes_s, groups=requests, requests=requests)
    assert layout == by.layout(wakes_s, groups=requests, requests=requests)
    return layout, wrong(layout, by, wakes_s, requests)


@settings(deadline=None, max_examples=100)
@given(st.fixed_dictionaries(CASES))
def test_never_without_an_engine_that_serves_and_never_predicted_to_be_slower(case: dict[str, object]) -> None:
    _, problem = laid_out(MARGIN, **case)  # type: ignore[arg-type]
    assert problem == ""


def test_a_planner_that_takes_what_is_slower_is_caught() -> None:
    case: dict[str, object] = {"wakes_s": [0.1, 0.1], "requests": 16, "slots": 64}
    layout, problem = laid_out(-0.9, 0.01, 1e-3, 0.01, 0.5, 0.3, **case)  # type: ignore[arg-type, misc]
    assert layout.drafting
    assert problem == "it is slower"


def test_waking_and_being_noticed_are_charged() -> None:
    """As long a wait as pays for responses of 1000 tokens is too long for those of 100."""
    by = planner()

    def pays(wake_s: float, tokens: float) -> bool:
        asked = replace(by, response_tokens=tokens)
        return bool(asked.layout([wake_s, wake_s], groups=4, requests=16).drafting)

    longest_s = max(wake_s for wake_s in (0.25 * k for k in range(40)) if pays(wake_s, 1000.0))
    assert 1.0 < longest_s < 1000 * by.table.plain_s(8), "not as long as all engines take for all of it"
    assert not pays(longest_s, 100.0)
    assert not pays(0.0, 20.0), "nobody would be noticed before the end"
