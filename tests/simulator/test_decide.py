"""The simulator calls what engines and `specactor plan` call, and nothing of its own in their place."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from specactor.planning import command as planning
from specactor.planning import search
from specactor.rollout import pool
from specactor.rollout.speculation import estimates, planner, windows
from specactor.rollout.speculation.drafter import DraftSequence
from specactor.rollout.speculation.windows import OFF
from specactor.simulator import engine as deciding
from specactor.simulator import rollout
from specactor.simulator.engine import AHEAD, Decider, Decision, Policy, placed
from specactor.simulator.requests import Remote
from tests.simulator.small import W, candidates, cluster, drafting, requests

SEQUENCES = [DraftSequence(request_id=str(i), prompt_ids=()) for i in range(8)]


def test_decisions_are_those_of_the_engine() -> None:
    """By identity: a copy, or a wrapper, would be another object."""
    assert deciding.search is planning.search is search.search
    assert deciding.of_drafter is planner.of_drafter
    assert deciding.choose is planner.choose is windows.choose
    assert deciding.AcceptanceModel is estimates.AcceptanceModel
    assert deciding.OnlineCosts is estimates.OnlineCosts
    assert rollout.assign is pool.assign


def defined(text: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}


def test_the_simulator_defines_no_second_policy() -> None:
    theirs = {
        "search",
        "choose",
        "best_windows",
        "of_drafter",
        "ready",
        "assign",
    }
    folder = Path(deciding.__file__).parent
    assert not {name for file in folder.glob("*.py") for name in defined(file.read_text())} & (theirs - {"assign"})
    assert "choose" in defined("def choose():\n    pass"), "the check would see one"


def decider(*, p: float = 0.6, ahead: bool = False, fits: Mapping[str, int] | None = None, **more: object) -> Decider:
    found, of = candidates(p), requests()
    policy = Policy(max_window=W, **more)  # type: ignore[arg-type]
    plan = placed(cluster(of), found, Policy(mode="decoupled", max_window=W) if ahead else policy)
    remote = Remote(seconds=drafting(0.001), served=8.0, message_s=0.0) if ahead else None
    survivals = {drafter.name: drafter.survival for drafter in found.drafters}
    return Decider(plan, found.verifiers[0], policy, remote, fits=dict(fits or {}), survivals=survivals)


def teach(one: Decider, method: str, accepted: int, times: int = 40) -> None:
    for _ in range(times):
        saw(one, method, SEQUENCES, accepted)


def saw(one: Decider, method: str, sequences: Sequence[DraftSequence], accepted: int) -> None:
    n = len(sequences)
    one.saw(method, [sequence.request_id for sequence in sequences], asked=[W] * n, accepted=[accepted] * n)


def decide(one: Decider) -> Decision:
    return one.decide(SEQUENCES, 8.0)


def test_windows_follow_what_was_seen() -> None:
    one = decider()
    teach(one, "small", W)
    teach(one, "large", 0)
    found = decide(one)
    assert (found.drafter, set(found.windows.tolist())) == ("small", {W})
    teach(one, "small", 0, times=800)
    assert decide(one).drafter == OFF
    assert not decide(one).windows.any()


def test_drafters_that_do_not_fit_wait_until_they_do() -> None:
    crowded, roomy = (decider(fits={"small": n, "large": n}) for n in (7, 8))
    for one in (crowded, roomy):
        for name in one.local:
            teach(one, name, W)
    assert decide(crowded).drafter == OFF
    assert decide(roomy).drafter != OFF


def test_a_drafter_elsewhere_is_reconfigured() -> None:
    one = decider(ahead=True, p=0.9)
    for name in one.local:
        teach(one, name, 0)
    teach(one, one.plan.drafter, W)
    one.acceptance["small" if one.plan.drafter == "large" else "large"].new_version(1.0)
    found = decide(one)
    assert found.kind in (AHEAD, one.plan.drafter)
    assert found.windows.max() == W


def test_a_drafter_elsewhere_offers_all_requests_one_window() -> None:
    """The best for all: requests with windows of their own would wait for the longest."""
    one = decider(ahead=True, p=0.9)
    for name in one.local:
        one.fits = {name: 0 for name in one.local}
    teach(one, one.plan.drafter, 2)
    for _ in range(400):  # every other request is nearly always right
        saw(one, one.plan.drafter, SEQUENCES[::2], W)
    found = decide(one)
    assert found.kind == AHEAD
    assert len(set(found.windows.tolist())) == 1


def test_a_drafter_that_nobody_has_seen_is_believed_to_be_as_planned() -> None:
    one = decider(p=0.9)
    planned = {drafter.name: drafter.survival for drafter in candidates(0.9).drafters}
    assert one.acceptance.keys() == planned.keys()
    for drafter, model in one.acceptance.items():
        believed = model.survivals(["0"], covered=False)[0]
        assert believed[:2] == pytest.approx(planned[drafter][:2], rel=0.02)


def test_rounds_that_take_longer_than_predicted_are_believed() -> None:
    """Rounds with drafts take four times what was predicted: plain decoding wins."""
    one = decider(p=0.6)
    for name in one.local:
        teach(one, name, 2)
    assert decide(one).drafter != OFF
    for _ in range(3):
        now = decide(one)
        if now.drafter != OFF:
            one.took(now, requests=8, seconds=4 * now.predicted_s, rounds=5)
    assert decide(one).drafter == OFF


@pytest.mark.parametrize("mode", ["off", "coupled", "decoupled"])
def test_other_modes_keep_the_plan(mode: str) -> None:
    one = decider(mode=mode)
    teach(one, one.plan.drafter, 0) if mode != "off" else None
    found = decide(one)
    assert np.unique(found.windows).tolist() == [one.plan.window]
    assert found.drafter == one.plan.drafter


def test_a_fixed_window_is_kept() -> None:
    of = requests()
    plan = placed(cluster(of), candidates(), Policy(mode="coupled", drafter="small", window=1, max_window=W))
    assert (plan.drafter, plan.window) == ("small", 1)
    assert placed(cluster(of), candidates(), Policy(placement="decoupled")).mode == "decoupled"
