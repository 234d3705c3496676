"""An engine with drafter processes emits what plain decoding emits, whatever becomes of the drafters."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from specactor.config import SpeculationConfig
from specactor.errors import EngineError
from specactor.rollout import drafter_pool
from specactor.rollout.decoupled.transport import DrafterAccess
from specactor.rollout.pool import EnginePool
from specactor.rollout.process_guard import descendants
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.rollout.speculation.counters import Counts, added
from specactor.types import RolloutRequest
from specactor.weights_sync.draft_push import DraftSender
from tests.rollout.conftest import Footprint, two_ranks_are_deep
from tests.rollout.decoupled.test_supervisor import assert_takes_no_time, child_of, is_listening
from tests.rollout.sglang.asking import in_background, probe
from tests.rollout.sglang.decoupled_setting import (
    LIMIT_S,
    OFF,
    REMOTE,
    aim,
    all_at_once,
    assert_engine_holds_nothing,
    assert_holds_nothing,
    decoupled,
    loaded,
    plain,
)
from tests.rollout.sglang.model_setting import (
    BATCH,
    ENGINE_KEYS,
    LONG,
    WAVES,
    Setting,
    address,
    aim_at_the_model,
    lending,
    setting,
)
from tests.rollout.sglang.pushes import DAMAGES, Pushes
from tests.rollout.sglang.test_model_drafter import make_dense
from tests.rollout.sglang.test_verify_worker import batch as batch_of_all_kinds
from tests.rollout.sglang.test_verify_worker import configure, facts, report

__all__ = ["lending", "setting"]

NEAR_AND_AHEAD = ("decoupled", f"{REMOTE}:Near")
"""Each request has one of the two, in the engine or elsewhere."""


@pytest.fixture(params=[0, 1], ids=["tp1", "tp2"])
def engine(request: pytest.FixtureRequest, setting: Setting) -> Engine:
    """Its drafter is the draft model."""
    chosen: Engine = setting.engines[request.param]
    chosen.flush()
    aim_at_the_model(setting, chosen)
    return chosen


def check_drafted(engine: Engine, config: SpeculationConfig, requests: list[RolloutRequest], least: int = 1) -> Counts:
    """Rollouts like plain decoding, until so many tokens were drafted: a short one may end before drafters have read
    the prompts."""
    want = plain(engine, requests)
    configure(engine, config)
    counts = Counts()
    deadline = time.monotonic() + LIMIT_S
    while counts.drafted < least:
        assert time.monotonic() < deadline, f"{counts.drafted} tokens were drafted"
        engine.flush()
        assert facts(engine.generate(requests)) == want
        counts += report(engine)
    return counts


@two_ranks_are_deep("engine", 0, 1)
@pytest.mark.parametrize("window", [1, 3, 8])
def test_the_target_itself_as_drafter_is_always_right(setting: Setting, engine: Engine, window: int) -> None:
    counts = check_drafted(engine, setting.speculation(window), BATCH, least=50)
    assert counts.accepted >= 0.999 * counts.drafted
    assert counts.failures == 0
    assert probe(engine, "remote")["window"] == window, "drafters need not be further ahead than two of these"


def test_requests_of_all_kinds(setting: Setting, engine: Engine) -> None:
    counts = check_drafted(engine, setting.speculation(), batch_of_all_kinds(), least=50)
    assert counts.accepted > 0
    assert counts.failures == 0


@two_ranks_are_deep("engine", 0, 1)
def test_windows_are_chosen(setting: Setting, engine: Engine) -> None:
    assert check_drafted(engine, setting.speculation(None), BATCH).failures == 0
    assert check_drafted(engine, setting.speculation(None, mode="auto"), BATCH, least=0).failures == 0


# Topologies: engines (0 and 2 have one rank, 1 has two) and drafters.

TOPOLOGIES = {
    "1:1": ((0,), 1),
    "1:1 tp2": ((1,), 1),
    "2:1": ((0, 2), 1),
    "2:1 tp1+tp2": ((0, 1), 1),
    "2:2": ((0, 2), 2),
    "2:2 tp1+tp2": ((2, 1), 2),
}
FURTHER = (
    *product(("2:1 tp1+tp2", "2:2", "2:2 tp1+tp2"), ("fixed window",)),
    *product(("1:1 tp2", "2:2 tp1+tp2"), ("switching",)),
)


@pytest.mark.parametrize(
    ("topology", "how"),
    [
        *product(("1:1", "2:1", "1:1 tp2"), ("fixed window",)),
        *product(("2:1 tp1+tp2", "2:2"), ("switching",)),
        *product(("2:2 tp1+tp2",), ("chosen windows", "drafters of their own", "auto")),
        *(pytest.param(*case, marks=pytest.mark.deep) for case in FURTHER),
    ],
)
def test_every_topology_emits_what_plain_decoding_emits(setting: Setting, topology: str, how: str) -> None:
    """The engines are asked the same, under the same names, at the same time."""
    config = {
        "fixed window": decoupled(4),
        "chosen windows": decoupled(None),
        "drafters of their own": decoupled(None, drafters=NEAR_AND_AHEAD),
        "auto": decoupled(None, mode="auto"),
        "switching": loaded("Switching"),
    }[how]
    which, drafters = TOPOLOGIES[topology]
    engines = [setting.engines[index] for index in which]
    endpoints = [drafter.spec.endpoint for drafter in setting.reciters.drafters[:drafters]]
    wanted = [plain(engine, BATCH) for engine in engines]
    for engine in engines:
        aim(engine, map(address, endpoints), setting.folder)
        configure(engine, config)
    counts = [dict[str, Counts]() for _ in engines]
    deadline, done = time.monotonic() + LIMIT_S, False
    while not done:
        assert time.monotonic() < deadline, f"not all drafters drafted, or nothing was accepted: {counts}"
        assert all_at_once(engines, BATCH) == wanted
        counts = [added([old, engine.speculation_counts()]) for old, engine in zip(counts, engines, strict=True)]
        accepted = all(sum(each.accepted for each in one.values()) > 0 for one in counts)
        done = how == "auto" or (accepted and all(is_busy(probe(engine, "remote")) for engine in engines))
    assert all(each.failures == 0 for one in counts for each in one.values())
    for engine in engines:
        assert_engine_holds_nothing(engine)
    for endpoint in endpoints:
        assert_holds_nothing(endpoint, ENGINE_KEYS)


def is_busy(state: dict[str, Any]) -> bool:
    """All drafters drafted for this engine, and in every way something was right."""
    ways = state["accepted"]
    return all(state["drafted"]) and (not state["switches"] or (ways["coupled"] > 0 and ways["decoupled"] > 0))


def test_a_rank_that_decides_for_itself_is_caught(setting: Setting) -> None:
    engine = setting.engines[1]
    want = plain(engine, BATCH)
    aim(engine, [address(setting.reciters.drafters[0].spec.endpoint)], setting.folder)
    for version in ("far", "another_token", "far"):
        configure(engine, loaded(version, 4))
        for _ in range(20):
            same = all_at_once([engine], BATCH) == [want]
            if not same or report(engine).accepted > 0:
                break
        assert same == (version == "far")


@two_ranks_are_deep("engine", 0, 1)
def test_modes_are_configured_while_requests_run(setting: Setting, engine: Engine) -> None:
    """At any round: half of the times soon again, else when the new mode has drafted something that was right."""
    aim(engine, [address(setting.reciters.drafters[0].spec.endpoint)], setting.folder)
    configs = [OFF, loaded("Near", 5), loaded("Switching"), decoupled(2), decoupled(8), decoupled(None)]
    configs += [decoupled(None, drafters=NEAR_AND_AHEAD)]
    rng = Random(1)
    want = plain(engine, LONG)
    counts: dict[str, Counts] = {"near": Counts(), "decoupled": Counts()}
    switches, limit_s, switched_s, before = 0, 0.0, 0.0, 0
    deadline = time.monotonic() + 5 * LIMIT_S
    while switches < 10 or not (counts["near"].accepted and counts["decoupled"].accepted):
        assert time.monotonic() < deadline, counts
        engine.flush()
        thread, answers = in_background(engine, LONG)
        while thread.is_alive():
            counts = added([counts, engine.speculation_counts()])
            accepted = sum(each.accepted for each in counts.values())
            if time.monotonic() - switched_s > limit_s or (limit_s > 1 and accepted > before):
                configure(engine, rng.choice(configs))
                switches, switched_s, before = switches + 1, time.monotonic(), accepted
                limit_s = rng.choice([rng.uniform(0.01, 0.15), 3.0])
            thread.join(0.01)
        assert facts(answers) == want
    assert all(each.failures == 0 for each in counts.values())


@pytest.fixture(scope="module")
def noise_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target's shape, and other weights."""
    return make_dense(tmp_path_factory.mktemp("noise"), "seed=7")


def during_a_rollout(engine: Engine, want: list[object], push: Callable[[], str]) -> str:
    """What a push says that is made while drafts arrive; tokens are as wanted."""
    ended: list[object] = []
    said: list[str] = []

    def at_the_end_of(trajectory: object) -> None:
        ended.append(trajectory)
        if not said and len(ended) < len(BATCH) - 4 and report(engine).drafted > 0:
            said.append(push())

    for _ in range(20):
        ended.clear()
        engine.flush()
        assert facts(engine.generate(BATCH, on_finished=at_the_end_of)) == want
        if said:
            return said[0]
    raise AssertionError("no draft arrived in time")


@two_ranks_are_deep("engine", 0, 1)
def test_pushes_to_a_drafter_that_drafts_change_no_token(
    setting: Setting, engine: Engine, noise_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damaged ones do not change its drafts either."""
    monkeypatch.setattr(drafter_pool, "LATE_S", 60.0)  # of a busy machine
    pool, config, sender = setting.drafters, setting.speculation(), DraftSender(torch.float32)
    want = plain(engine, BATCH)
    configure(engine, config)
    push = Pushes(sender, lambda weights: "".join(pool.renew(weights)[0]), version=pool.oldest_version() or 0)

    def accept_rate() -> float:
        counts = check_drafted(engine, config, BATCH, least=50)
        return counts.accepted / counts.drafted

    def errs() -> bool:
        found = (check_drafted(engine, config, BATCH) for _ in range(5))
        return any(counts.accepted < counts.drafted for counts in found)

    held = pool.oldest_version()
    for damage, message in DAMAGES.items():
        said = during_a_rollout(engine, want, lambda damage=damage: push(noise_dir, damage))  # type: ignore[misc]
        assert message in said
        assert pool.oldest_version() == held
    assert accept_rate() >= 0.999, "it still has the target's weights"
    assert during_a_rollout(engine, want, lambda: push(noise_dir)) == ""
    assert pool.oldest_version() == push.version
    assert errs(), "other weights draft otherwise"
    assert push(setting.draft_dir) == ""
    assert accept_rate() >= 0.999
    sender.close()


def test_a_drafter_that_dies_costs_no_token(setting: Setting) -> None:
    """It dies while it drafts; the engine goes on without it, and finds the one that takes its place."""
    engine = setting.engines[0]
    aim_at_the_model(setting, engine)
    want = plain(engine, BATCH)
    pool = setting.drafters
    configure(engine, setting.speculation())
    engine.flush()
    seen: list[str] = []
    footprint = Footprint.of(pool.drafters[0].pid)
    restarts = pool.restarts

    def kill(trajectory: object) -> None:
        seen.append("")
        if len(seen) == 2:
            os.kill(descendants(pool.drafters[0].pid)[0], signal.SIGKILL)

    assert facts(engine.generate(BATCH, on_finished=kill)) == want
    deadline = time.monotonic() + 120
    while pool.restarts == restarts:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pool.drafters[0].wait_ready()
    footprint.assert_gone(within_s=0.1)
    report(engine)
    deadline = time.monotonic() + LIMIT_S
    while report(engine).accepted == 0:
        assert time.monotonic() < deadline, "no draft of the new drafter was accepted"
        engine.flush()
        assert facts(engine.generate(BATCH)) == want


# On the device of an engine that has run dry


def lend(
    pool: EnginePool, setting: Setting, done: Callable[[Counts], bool], strike: Callable[[object], None] | None = None
) -> None:
    """Rollouts like plain decoding, until what drafts did in one is as wanted; after each the core is free."""
    [busy, _], [sleeper] = pool.engines, pool.drafters.drafters
    want = plain(busy, WAVES)
    aim(busy, [address(sleeper.spec.endpoint)], setting.folder)
    configure(busy, setting.speculation())
    for _ in range(20):
        busy.flush()
        outcome = pool.generate(WAVES, on_finished=strike)
        assert facts(outcome.finished) == want
        assert outcome.drafters_woken > 0
        assert not pool.drafters.any_awake()
        assert not is_listening(sleeper.spec)
        counts = report(busy)
        assert counts.failures == 0
        if done(counts):
            return
    raise AssertionError(f"the drafter on the dry engine's core did not help: {counts}")


@pytest.mark.deep  # the one that is killed there drafts, too
def test_a_dry_engines_core_drafts_for_the_other_and_is_left_in_time(setting: Setting, lending: EnginePool) -> None:
    def right(counts: Counts) -> bool:
        assert counts.accepted >= 0.999 * counts.drafted, "it has the target's weights"
        return counts.accepted > 0

    lend(lending, setting, right)
    [sleeper] = lending.drafters.drafters
    assert sleeper.alive
    assert sleeper.wake_s > 0, "its waking was measured"
    assert_takes_no_time(child_of(sleeper))
    lend(lending, setting, right)


def test_a_drafter_on_a_dry_engines_core_that_is_killed_costs_no_token(setting: Setting, lending: EnginePool) -> None:
    [sleeper], [busy, _] = lending.drafters.drafters, lending.engines
    footprint, killed = Footprint.of(sleeper.pid), []

    def strike(trajectory: object) -> None:
        if not killed and lending.drafters.any_awake() and report(busy).accepted > 0:
            os.kill(child_of(sleeper), signal.SIGKILL)
            killed.append(trajectory)

    lend(lending, setting, lambda counts: bool(killed), strike)
    footprint.assert_gone()


def test_an_engine_without_drafters_refuses_the_mode_unless_they_would_be_lent(
    make_spec: Callable[..., EngineSpec], setting: Setting, tmp_path: Path
) -> None:
    spec = make_spec(69, speculation=setting.speculation(), log_file=str(tmp_path / "log"))
    with pytest.raises(EngineError, match=r"with more parallel.drafters"), running(spec):
        pass
    with running(replace(spec, drafters=DrafterAccess(may_be_none=True))) as engine:
        responses = engine.generate(BATCH[:4])
        assert [len(r.token_ids) for r in responses] == [r.sampling.max_new_tokens for r in BATCH[:4]]
