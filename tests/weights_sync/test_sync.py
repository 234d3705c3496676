"""Megatron's shards to real engines, bit for bit, under every layout; and faults on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from specactor.config import TinyModelConfig
from specactor.data.tiny_model import make_tiny_model
from specactor.rollout.warm_starter import WarmStarter
from specactor.weights_sync.messages import LOAD
from tests.lib.ranks import run_ranks, torchrun
from tests.weights_sync.kills import CASES as CASES_OF_KILLS
from tests.weights_sync.kills import FIRST as FIRST_KILLS
from tests.weights_sync.kills import remaining

LAYOUTS: dict[int, dict[str, dict[str, int]]] = {
    2: {
        "TP2": {"tensor": 2, "expert_tensor": 2},
        "PP2": {"pipeline": 2},
        "PP2xVPP2": {"pipeline": 2, "virtual_pipeline": 2},
        "CP2": {"context": 2},
        "DP2": {},
        "TP2xEP2": {"tensor": 2, "expert": 2},
        "EP2": {"expert": 2},
    },
    4: {
        "TP2xPP2": {"tensor": 2, "expert_tensor": 2, "pipeline": 2},
        "PP2xEP2": {"pipeline": 2, "expert": 2},
    },
}
PUSHES = ("one_host", "by_plan", "several_hosts", "several_hosts_by_plan")
FIRST = len(FIRST_KILLS)
PARTS = 6
"""Of the further kills, each in a start of its own."""
COVERED = ("CP2", "PP2")
"""Deep: ranks of the first have the same weights, as those of DP2; the stages of the second are those of PP2xVPP2."""
CASES = [
    pytest.param(world, name, marks=[pytest.mark.deep] if world == 4 or name in COVERED else [])
    for world, layouts in LAYOUTS.items()
    for name in layouts
]
"""In `make check` two ranks have every kind of parallelism; two kinds at once need four."""
VICTIM = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.fixture(scope="session")
def results(
    request: pytest.FixtureRequest, warm_starter: WarmStarter, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, dict[str, Any]]:
    deep = any(item.get_closest_marker("deep") for item in request.session.items)
    folder = tmp_path_factory.mktemp("sync")
    shape = TinyModelConfig(num_layers=6, hidden_size=128, num_experts=4, expert_size=64)
    make_tiny_model(shape, 0, folder / "model")
    return {world: run(world, folder, deep) for world in LAYOUTS if world == 2 or deep}


def run(world: int, folder: Path, deep: bool) -> dict[str, Any]:
    """One start of trainer ranks and engines."""
    own = folder / str(world)
    own.mkdir()
    arguments = (
        folder / "model",
        json.dumps({name: sizes for name, sizes in LAYOUTS[world].items() if name not in COVERED or deep}),
        1 + int(deep) if world == 2 else 0,
        own,
        *((0, FIRST) if world == 2 else ()),
    )
    run_ranks(world, "tests.weights_sync.sync_script", *arguments, folder=own)
    found: dict[str, Any] = json.loads((own / "results.json").read_text())
    return found


@pytest.mark.parametrize(("world", "name"), CASES)
def test_every_engine_rank_holds_the_trainers_weights(
    results: dict[int, dict[str, Any]], world: int, name: str
) -> None:
    result = results[world][name]
    for push in PUSHES:
        assert "error" not in result[push], result[push]
        assert result[push]["alike"]
        assert result[push]["num_bytes"] == result["one_host"]["num_bytes"] > 0
    assert result["one_host"]["num_rounds"] == 1
    assert result["several_hosts"]["num_rounds"] > 2
    assert result["by_plan"]["num_rounds"] == result["several_hosts_by_plan"]["num_rounds"] == 0
    assert result["one_host"]["note"] == result["several_hosts"]["note"] == ""
    assert result["wrong"] == []
    assert [result[f"wrong_{push}"] for push in PUSHES[1:]] == [[]] * 3


@pytest.mark.parametrize(("world", "name"), CASES)
def test_between_hosts_goes_what_the_engines_host_lacks(
    results: dict[int, dict[str, Any]], world: int, name: str
) -> None:
    result = results[world][name]
    by_plan = result["several_hosts_by_plan"]
    lacks = by_plan["num_bytes"] - result["on_first_host"]
    assert by_plan["link_bytes"] == lacks
    assert (lacks == 0) == (name in ("DP2", "CP2"))
    assert result["one_host"]["link_bytes"] == result["by_plan"]["link_bytes"] == 0


@pytest.mark.parametrize(("world", "name"), CASES)
def test_ranks_together_hand_over_every_tensor_once(results: dict[int, dict[str, Any]], world: int, name: str) -> None:
    assert results[world][name]["union"] == {"equal": True, "once": True}


@pytest.mark.parametrize(("world", "name"), CASES)
def test_nothing_of_the_old_policy_is_left_in_the_caches(
    results: dict[int, dict[str, Any]], world: int, name: str
) -> None:
    assert results[world][name]["changed"]
    assert results[world][name]["cache_dropped"]


@pytest.mark.parametrize("fault", ["flip", "flip in the last round"])
def test_a_flipped_bit_leaves_the_engines_at_the_old_version(results: dict[int, dict[str, Any]], fault: str) -> None:
    result = results[2]["faults"][fault]
    assert result["alike"]
    assert "failed in its check stage" in result["error"]
    assert "arrived with a wrong digest" in result["error"]
    assert ".weight" in result["error"]
    assert result["unharmed"]
    assert (result["rounds"] > 2) == (fault == "flip in the last round")


def test_the_comparison_sees_two_experts_in_each_others_place(results: dict[int, dict[str, Any]]) -> None:
    assert results[2]["faults"]["wrong name"]["victims"]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("missing", "elements: the trainer sent too little"),
        ("shape", VICTIM),
        ("flip while loading", "arrived with a wrong digest"),
        pytest.param("killed", "engine 0", marks=pytest.mark.deep),
        ("timeout", "engine 0"),
    ],
)
def test_an_engine_that_may_hold_a_mixture_is_replaced(
    results: dict[int, dict[str, Any]], fault: str, expected: str
) -> None:
    result = results[2]["faults"][fault]
    assert result["alike"]
    assert expected in result["error"]
    assert result["lost"]
    assert result["again"]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("flip by plan", "arrived with a wrong digest"),
        pytest.param("killed by plan", "engine 0", marks=pytest.mark.deep),
        ("flip on the link", "arrived with a wrong digest"),
        ("stale on the link", "arrived with a wrong digest"),
    ],
)
def test_an_engine_that_pulled_something_else_is_replaced(
    results: dict[int, dict[str, Any]], fault: str, expected: str
) -> None:
    result = results[2]["faults"][fault]
    assert result["alike"]
    assert expected in result["error"]
    assert "It was stopped" in result["error"]
    assert "weight arrived" in result["error"] or fault == "killed by plan"
    assert result["lost"]
    assert result["again"] == [1, 0]  # the new engine has no plan yet
    assert result["unharmed"]


def test_a_parameter_that_leaves_the_shared_memory_is_sent_from_where_it_is(results: dict[int, dict[str, Any]]) -> None:
    assert results[2]["faults"]["moved"] == {"rounds": [1, 0], "wrong": []}


def assert_survived(kills: list[dict[str, Any]]) -> None:
    """Every engine has the old version or the new one, or is dead and leaves nothing; then all have the new one."""
    for kill in kills:
        assert kill["struck"], kill
        assert kill["alike"], kill
        assert "mixture" not in kill["hold"], kill
        assert len({hold for hold in kill["hold"] if hold != "dead"}) <= 1, kill
        assert kill["failed"] or "old" not in kill["hold"], kill
        assert kill["left"] == [], kill
        assert kill["again"], kill
        if kill["case"][1] == LOAD:  # all was checked before, so that the other engine goes on
            assert "new" in kill["hold"], kill
    assert kills[-1]["more_memory"] <= 0
    assert kills[-1]["would be seen"], "a mixture answers like neither version"
    assert any("dead" in kill["hold"] for kill in kills)


def test_a_killed_engine_is_replaced_and_leaves_nothing(results: dict[int, dict[str, Any]]) -> None:
    kills = results[2]["kills"]
    assert len(kills) == FIRST
    assert_survived(kills)
    # The first cases hold every stage: in some of them the push ends before any engine has the new version.
    assert any("old" in kill["hold"] for kill in kills)


@pytest.mark.deep
@pytest.mark.parametrize("part", range(PARTS))
def test_engines_that_are_killed_in_every_other_case(warm_starter: WarmStarter, tmp_path: Path, part: int) -> None:
    """In every stage of a push by buckets and by plan: before, in and after its call, and each process of an engine."""
    shape = TinyModelConfig(num_layers=2, hidden_size=128, num_experts=4, expert_size=64)
    make_tiny_model(shape, 0, tmp_path / "model")
    layout = json.dumps({"EP2": LAYOUTS[2]["EP2"]})
    start, end = (FIRST + (len(CASES_OF_KILLS) - FIRST) * i // PARTS for i in (part, part + 1))
    arguments = (tmp_path / "model", layout, 0, tmp_path, start, end)
    run_ranks(2, "tests.weights_sync.sync_script", *arguments, folder=tmp_path)
    kills = json.loads((tmp_path / "results.json").read_text())["kills"]
    assert len(kills) == end - start
    assert_survived(kills)


@pytest.mark.deep
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("by_plan", "exchange"), [*((False, i) for i in range(1, 10)), (True, 1), (True, 2)])
def test_a_killed_rank_takes_its_engines_with_it(
    warm_starter: WarmStarter, tmp_path: Path, rank: int, by_plan: bool, exchange: int
) -> None:
    """At every exchange of a push: the job ends, and nothing of the engines is left to serve a mixture."""
    shape = TinyModelConfig(num_layers=2, hidden_size=128, num_experts=4, expert_size=64)
    make_tiny_model(shape, 0, tmp_path / "model")
    arguments = (tmp_path / "model", json.dumps({"EP2": LAYOUTS[2]["EP2"]}), 0, tmp_path, rank, int(by_plan), exchange)
    code, said = torchrun(2, "tests.weights_sync.sync_script", *arguments, folder=tmp_path)
    assert code != 0
    assert not (tmp_path / "results.json").exists(), said[-2000:]
    owned, files = json.loads((tmp_path / "held.json").read_text())
    assert len(owned) > 4
    # The iterator leaves out those that end under its hands.
    there = [p for p in psutil.process_iter(["create_time"]) if [p.pid, p.info["create_time"]] in owned]
    assert remaining(there, set(files)) == []


@pytest.mark.deep
def test_a_copy_on_another_host_that_differs_ends_the_engines(warm_starter: WarmStarter, tmp_path: Path) -> None:
    """Each host takes the weights from its own rank; one bit differs on one of them. None is started again."""
    shape = TinyModelConfig(num_layers=2, hidden_size=128, num_experts=4, expert_size=64)
    make_tiny_model(shape, 0, tmp_path / "model")
    run_ranks(2, "tests.weights_sync.diverged_script", tmp_path / "model", tmp_path, folder=tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["first"] == [1, 0]
    assert found["alike"]
    assert found["error"][0] == "CopiesDifferError"
    assert "experts.w13_weight is not the same on trainer ranks 0 and 1" in found["error"][1]
    assert (found["lost"], found["started"], found["notes"]) == (2, 0, [])
    assert found["again"] == [1, 0]
    assert found["same answers"] == [True, True]
