"""A real engine and its drafters in trouble: the tokens of plain decoding, in bounded time, and nothing is left.

One engine, whose KV pool is too small for all that is asked of it, and a drafter process that recites what the engine
emitted in plain decoding, as told by each test.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from specactor.config import EngineConfig
from specactor.rollout import drafter_pool
from specactor.rollout.decoupled.supervisor import DrafterProcess
from specactor.rollout.decoupled.transport import make_keys
from specactor.rollout.drafter_pool import DrafterPool
from specactor.rollout.drafter_start import kept_endpoint
from specactor.rollout.pool import EnginePool
from specactor.rollout.process_guard import descendants
from specactor.rollout.sglang.engine_client import EngineSpec
from specactor.rollout.speculation.counters import Counts
from specactor.types import RolloutRequest, Trajectory
from tests.rollout.conftest import Footprint, request
from tests.rollout.sglang import recital
from tests.rollout.sglang.asking import assert_same, differs, in_background, probe
from tests.rollout.sglang.bad_network import Faults, Network
from tests.rollout.sglang.decoupled_setting import (
    LIMIT_S,
    OFF,
    assert_engine_holds_nothing,
    assert_holds_nothing,
    decoupled,
    loaded,
    recital_folder,
    recital_spec,
    wait_until,
)
from tests.rollout.sglang.faults_setting import BATCH, DRAFTER_KEYS, ENDLESS, LONG, Setting, titled
from tests.rollout.sglang.lying_drafter import LIES, LyingDrafter
from tests.rollout.sglang.parts import in_two, with_seam
from tests.rollout.sglang.sampling_cases import STOPS, make_tokenizer, with_options
from tests.rollout.sglang.test_verify_worker import configure, report

POOL = 900


@pytest.fixture(scope="module")
def setting(
    make_spec: Callable[..., EngineSpec], model_dir: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Setting]:
    folder = recital_folder(tmp_path_factory.mktemp("recital"))
    with_text = tmp_path_factory.mktemp("text") / "model"
    shutil.copytree(model_dir, with_text)
    make_tokenizer(with_text)
    spec = make_spec(
        70,
        model_dir=str(with_text),
        config=EngineConfig(
            max_running_requests=16,
            max_total_tokens=POOL,
            extra_args={"schedule_conservativeness": 0.2},
        ),
        speculation=loaded("far"),
    )
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(drafter_pool, "RETRY_PAUSE_S", 0.05)
        patch.setattr(EngineConfig, "request_timeout_s", 60.0)
        drafters = stack.enter_context(DrafterPool([recital_spec(folder, keys=DRAFTER_KEYS)]))
        engines = stack.enter_context(EnginePool([spec]))
        engines.wait_ready()
        drafters.wait_ready()
        [engine] = engines.engines
        configure(engine, OFF)
        plain: dict[str, Trajectory] = {}
        for requests in (BATCH, LONG, ENDLESS):
            engine.flush()
            trajectories = engine.generate(requests)
            recital.write(folder, requests, trajectories)
            plain |= {t.request_id: t for t in trajectories}
        yield Setting(engines, drafters, folder, plain)


@pytest.fixture
def near(setting: Setting) -> Setting:
    """The engine asks the drafter itself."""
    setting.aim(setting.endpoint)
    return setting


# What drafters say


@pytest.mark.parametrize("manner", sorted(recital.MANNERS.keys() - {"raises"}))
def test_whatever_is_drafted_tokens_are_the_targets(near: Setting, manner: str) -> None:
    near.start(decoupled(), manner)
    silent = manner in ("nothing", "not tokens")
    counts = Counts()
    for _ in range(3 if silent else 40):
        near.engine.flush()
        assert_same(near.run(BATCH), near.wanted(BATCH))
        counts += report(near.engine)
        if counts.drafted > 20:
            break
    assert (counts.drafted > 20) != silent
    assert counts.failures == 0
    if manner in ("right", "half", "slow", "mixed"):
        assert counts.accepted > 0
    if manner == "right":
        assert counts.accepted == counts.drafted
    near.assert_clean()


@pytest.mark.parametrize("lie", [*LIES, "rubbish", "frames of others"])
def test_a_peer_that_lies_on_a_raw_socket(setting: Setting, lie: str) -> None:
    with LyingDrafter(lie) as liar:
        setting.aim(liar.endpoint, keys=None)
        setting.start(decoupled())
        deadline = time.monotonic() + LIMIT_S
        while liar.sent < 200:
            assert_same(setting.run(BATCH), setting.wanted(BATCH))
            assert time.monotonic() < deadline, "the engine hardly speaks to it"
        assert report(setting.engine).failures == 0
        assert_engine_holds_nothing(setting.engine)


# Who drafts


def test_a_drafter_that_is_killed_and_started_again(near: Setting) -> None:
    near.start(decoupled())
    near.run_until_drafted()
    footprint, restarts, seen = Footprint.of(near.drafters.drafters[0].pid), near.drafters.restarts, []

    def kill(trajectory: Trajectory) -> None:
        seen.append(trajectory)
        if len(seen) == 2:
            os.kill(near.pid, signal.SIGKILL)

    assert_same(near.run(BATCH, on_finished=kill), near.wanted(BATCH))
    wait_until(lambda: near.drafters.restarts > restarts, "the drafter was not started again")
    near.drafters.drafters[0].wait_ready()
    footprint.assert_gone(within_s=0.1)
    report(near.engine)
    near.run_until_drafted()
    near.assert_clean()


def test_a_continuer_that_raises(near: Setting) -> None:
    restarts = near.drafters.restarts
    near.start(decoupled(), "raises")

    def is_replaced() -> bool:
        assert_same(near.run(BATCH), near.wanted(BATCH))  # a run may be over before the drafter has its requests
        return near.drafters.restarts > restarts

    wait_until(is_replaced, "the drafter was not started again")
    recital.behave(near.folder, "half")
    near.run_until_drafted()
    near.assert_clean()


def test_a_drafter_that_stands_still_and_goes_on(near: Setting) -> None:
    near.start(decoupled())
    near.run_until_drafted()
    seen: list[Trajectory] = []

    def strike(trajectory: Trajectory) -> None:
        seen.append(trajectory)
        if len(seen) in (2, 7):
            os.kill(near.pid, signal.SIGSTOP if len(seen) == 2 else signal.SIGCONT)

    assert_same(near.run(BATCH, on_finished=strike), near.wanted(BATCH))
    os.kill(near.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: not _is_live_after_a_run(near), "a drafter that stands still is not missed")
        report(near.engine)
        assert_same(near.run(BATCH), near.wanted(BATCH))
        assert report(near.engine).drafted == 0
    finally:
        os.kill(near.pid, signal.SIGCONT)
    near.run_until_drafted()
    near.assert_clean()


def _is_live_after_a_run(setting: Setting) -> bool:
    assert_same(setting.run(BATCH), setting.wanted(BATCH))
    return bool(probe(setting.engine, "remote")["live"])


# The network

FAULTS = {
    "slow": Faults(delay_s=(0.004, 0.004)),
    "loses": Faults(loss=0.3),
    "repeats": Faults(repeat=0.5),
    "reorders": Faults(delay_s=(0.0, 0.01)),
    "everything": Faults(loss=0.1, repeat=0.2, delay_s=(0.0, 0.006)),
}


@pytest.fixture(scope="module")
def exposed(setting: Setting) -> Iterator[str]:
    """Address of another drafter, without keys: what is in between can read names."""
    with DrafterPool([recital_spec(setting.folder, keys=None, index=1)]) as pool:
        pool.wait_ready()
        yield pool.drafters[0].spec.endpoint


@pytest.mark.parametrize("kind", FAULTS)
def test_a_bad_network(setting: Setting, exposed: str, kind: str) -> None:
    faults = FAULTS[kind]
    with Network(exposed, faults) as network:
        setting.aim(network.endpoint, keys=None)
        setting.start(decoupled())
        wanted = [faults.loss > 0, faults.repeat > 0, faults.delay_s[0] < faults.delay_s[1]]

        def enough() -> bool:
            setting.run_until_drafted()
            happened = [count > 5 for count in (network.lost, network.repeated, network.overtaken)]
            return network.passed >= 200 and happened == wanted

        wait_until(enough, f"frames that were lost, repeated and overtaken: expected {wanted}")
        assert_engine_holds_nothing(setting.engine)
    setting.aim(exposed, keys=None)
    setting.start(decoupled())  # the engine begins anew, as far as the drafter knows: nothing is left of the last time
    setting.run_until_drafted()
    assert_holds_nothing(exposed, None)


# Addresses and keys


def test_drafters_of_two_hosts_with_keys_of_their_own(setting: Setting) -> None:
    """On two addresses of this one. One of them dies, and is found again at the port that was kept for it."""
    of_engines, of_drafters = zip(make_keys(), make_keys(), strict=True)
    with ExitStack() as stack:
        endpoints = [kept_endpoint(address, stack) for address in ("127.0.0.1", "127.0.0.2")]
        specs = [
            recital_spec(setting.folder, keys=of_drafters[host], endpoint=endpoint, index=2 + host)
            for host, endpoint in enumerate(endpoints)
        ]
        with DrafterPool(specs) as pool:
            pool.wait_ready()
            assert [started.endpoint for d in pool.drafters if (started := d.started)] == [s.endpoint for s in specs]
            setting.aim_at(specs, of_engines)
            setting.start(decoupled())
            wait_until(lambda: setting.drafted_there() == [True, True], "one of the two drafts nothing")
            os.kill(descendants(pool.drafters[1].pid)[0], signal.SIGKILL)
            wait_until(lambda: pool.restarts == 1, "it is not started again")
            pool.drafters[1].wait_ready()
            wait_until(lambda: all(setting.drafted_there()) and _has_drafted(pool.drafters[1]), "it is not found again")
            setting.start(loaded("accepts_all", 4))
            wait_until(lambda: differs(setting.run(BATCH), setting.wanted(BATCH)), "what they draft is not compared")
            setting.start(loaded("far", 4))
            for spec, keys in zip(specs, of_engines, strict=True):
                assert_holds_nothing(spec.endpoint, keys)
            strangers, _ = make_keys()
            pretending = [replace(strangers, peer=keys.peer) for keys in of_engines]
            for wrong in (of_engines[::-1], [strangers, strangers], pretending, [None, None]):
                setting.aim_at(specs, wrong)
                setting.start(decoupled())
                for _ in range(3):
                    assert_same(setting.run(BATCH), setting.wanted(BATCH))
                assert report(setting.engine).drafted == 0
                assert probe(setting.engine, "remote")["live"] == []


def _has_drafted(drafter: DrafterProcess) -> bool:
    work = drafter.work(trace=False)
    return work is not None and work.busy_s > 0


# The engine


def test_abort_in_the_middle(near: Setting) -> None:
    near.start(decoupled())
    near.run_until_drafted()
    near.engine.flush()
    free = probe(near.engine, "free")
    answers: list[Trajectory] = []
    for _ in range(20):  # the end may come before the abort
        thread, answers = in_background(near.engine, LONG)
        while thread.is_alive() and min(probe(near.engine, "lengths"), default=0) < 5:
            pass
        near.engine.abort()
        thread.join(LIMIT_S)
        if "abort" in {t.finish_reason for t in answers}:
            break
    assert "abort" in {t.finish_reason for t in answers}
    for ours, whole in zip(answers, near.wanted(LONG), strict=True):
        assert ours.token_ids == whole.token_ids[: len(ours.token_ids)]
        np.testing.assert_allclose(ours.logprobs, whole.logprobs[: len(ours.logprobs)], atol=1e-5, rtol=0)
    near.assert_clean()
    near.engine.flush()
    assert probe(near.engine, "free") == free
    near.run_until_drafted()


def test_retracted_requests(near: Setting) -> None:
    """More than the KV pool holds: requests are thrown out, and come back to the drafter as others."""
    near.start(decoupled())
    near.run_until_drafted()
    near.engine.flush()
    probe(near.engine, "seen")
    assert_same(near.run(ENDLESS), near.wanted(ENDLESS))
    assert probe(near.engine, "seen")["retracted"] > 0
    counts = report(near.engine)
    assert counts.accepted > 0
    assert counts.failures == 0
    near.assert_clean()


# Wrong versions


@pytest.mark.parametrize(
    "version", ["emits_the_rejected", "accepts_all", "skips_a_mismatch", "keeps_keys_of_the_rejected"]
)
def test_wrong_versions_are_caught_in_mode_decoupled(near: Setting, version: str) -> None:
    near.start(loaded("far", 4))
    near.run_until_drafted()
    near.start(loaded(version, 4))
    wait_until(lambda: differs(near.run(BATCH), near.wanted(BATCH)), "the wrong version passes for the right one")
    near.start(loaded("far", 4))
    near.run_until_drafted()


@pytest.mark.parametrize("version", ["bonus_of_the_row_before", "accepted_of_the_neighbour"])
def test_wrong_versions_are_caught_where_modes_switch(near: Setting, version: str) -> None:
    near.start(loaded(version))
    wait_until(lambda: differs(near.run(BATCH), near.wanted(BATCH)), "the wrong version passes for the right one")
    near.start(loaded("mended"))
    near.run_until_drafted()


# Last, since it takes another engine


@pytest.mark.deep  # as drafters that are; faults/test_faults.py kills engines, too
def test_an_engine_that_is_killed_and_started_again(near: Setting) -> None:
    near.start(decoupled())
    near.run_until_drafted()
    old, seen = near.engine, []
    footprint = Footprint.of(old.pid)

    def kill(trajectory: Trajectory) -> None:
        seen.append(trajectory)
        if len(seen) == 3:
            assert old.ready is not None
            os.kill(old.ready.scheduler_pids[0], signal.SIGKILL)

    requests = [*BATCH, *LONG]  # which go on for long when the first ones have ended
    outcome = near.engines.generate(requests, on_finished=kill)
    assert near.engines.lost() == (old.index,)
    ended = {t.request_id for t in outcome.finished}
    assert_same(outcome.finished, near.wanted([r for r in requests if r.request_id in ended]))
    near.engines.restart_lost()
    footprint.assert_gone()
    near.aim(near.endpoint)
    near.start(decoupled())
    assert outcome.unfinished
    assert_same(near.run(outcome.unfinished), near.wanted(outcome.unfinished))
    near.run_until_drafted()
    near.assert_clean()


def test_every_option_stop_strings_and_responses_in_parts(setting: Setting) -> None:
    """The drafter recites on beyond the stop strings.

    Wrong versions of the seam are caught in `test_interruptions`.
    """
    stops = [request(i, new=40, stop=STOPS[i % len(STOPS)], ignore_eos=i % 2 == 0) for i in range(36, 66)]
    requests = titled("options", [replace(r, seed=r.seed + 50_000) for r in (*with_options(36), *stops)])
    endless = [replace(r, sampling=replace(r.sampling, stop=())) for r in requests]
    configure(setting.engine, OFF)
    setting.engine.flush()
    recital.write(setting.folder, endless, setting.run(endless))
    setting.engine.flush()
    plain = setting.run(requests)
    assert sum(bool(r.sampling.stop) and t.finish_reason == "stop" for r, t in zip(requests, plain, strict=True)) > 10
    setting.aim(setting.endpoint)
    setting.start(decoupled(), "right")  # another manner than before, or the new texts are not read

    def generate(some: Sequence[RolloutRequest]) -> list[Trajectory]:
        setting.engine.flush()
        return setting.run(some)

    counts = Counts()
    deadline = time.monotonic() + LIMIT_S
    while counts.accepted < 50:
        assert time.monotonic() < deadline, f"{counts.accepted} draft tokens were accepted"
        assert_same(generate(requests), plain)
        assert_same(in_two(generate, requests, plain, late=False), with_seam(plain, plain))
        counts += report(setting.engine)
    assert counts.failures == 0
    setting.assert_clean()
