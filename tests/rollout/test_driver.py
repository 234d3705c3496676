"""Any stops and deaths, with fakes of engines: every response is the one of an undisturbed run."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from specactor.errors import EngineError
from specactor.rollout import resume
from specactor.rollout.driver import Driver
from specactor.rollout.requests import assign
from specactor.rollout.sglang.engine_client import Engine
from specactor.types import RolloutRequest, Trajectory
from tests.rollout.driver_cases import GROUPS, FakeEngine, drive, enough, expected, make_requests


@pytest.mark.parametrize("seed", range(20))
def test_engines_that_die_lose_only_what_ran_there(seed: int) -> None:
    requests = make_requests(seed)
    engines = [FakeEngine(), FakeEngine(dies_after=3 + seed), FakeEngine()]
    driver, seen = drive(engines, requests)
    assert sorted(t.request_id for t in seen) == sorted(driver.done), "each once"
    wanted = {r.request_id: expected(r) for r in requests}
    assert all(response.token_ids == wanted[name] for name, response in driver.done.items())
    on_others = {r.request_id for i, part in enumerate(assign(requests, 3)) for r in part if i != 1}
    assert on_others <= driver.done.keys()


def restarted(request: RolloutRequest, emitted: int) -> int:
    """The noise begins anew where the request does."""
    return len(request.prompt_ids) + emitted - resume.num_begun(request)


def one_off(request: RolloutRequest, emitted: int) -> int:
    """The last token of the beginning was dropped."""
    return len(request.prompt_ids) + emitted - (1 if request.begun else 0)


def stopped_and_gone_on(seed: int, later: FakeEngine) -> list[str]:
    """Requests whose tokens are not those of an undisturbed run, when two of the groups stop a rollout, and another
    engine goes on with the others."""
    requests = make_requests(seed)
    driver, _ = drive([FakeEngine(), FakeEngine()], requests, is_enough=enough(2))
    assert set(driver.done) | set(driver.stopped) == {r.request_id for r in requests}
    assert not set(driver.done) & set(driver.stopped)
    missing = Counter(r.group_id for r in driver.stopped.values())
    assert GROUPS - len(missing) >= 2
    rest, _ = drive([later], list(driver.stopped.values()))
    found = driver.done | rest.done
    for response in found.values():
        assert len(response.logprobs) == len(response.token_ids)
    return [r.request_id for r in requests if found[r.request_id].token_ids != expected(r)]


@pytest.mark.parametrize("seed", range(20))
def test_enough_groups(seed: int) -> None:
    """It stops; what was begun goes on from there in another rollout, to the same tokens."""
    assert stopped_and_gone_on(seed, FakeEngine()) == []


@pytest.mark.parametrize("wrong", [restarted, one_off])
def test_a_wrong_seam_is_caught(wrong: Callable[[RolloutRequest, int], int]) -> None:
    assert any(stopped_and_gone_on(seed, FakeEngine(position_of=wrong)) for seed in range(20))


def test_no_group_is_wanted() -> None:
    requests = make_requests(0)
    driver, _ = drive([FakeEngine()], requests, is_enough=enough(0))
    assert driver.done == {}
    assert list(driver.stopped.values()) == requests


class Late(FakeEngine):
    """Takes its requests only when it was told to end some of them, and after its first report of them goes no further
    before it was told again."""

    def __init__(self) -> None:
        super().__init__()
        self.told, self.told_again = threading.Event(), threading.Event()

    def generate(self, requests: Sequence[RolloutRequest], **more: Any) -> None:
        self.told.wait(20)
        on_progress = more["on_progress"]

        def report(request: RolloutRequest, so_far: Trajectory) -> None:
            on_progress(request, so_far)
            self.told_again.wait(20)
            self.told_again.set()  # so that a driver that does not repeat itself fails soon

        super().generate(requests, **more | {"on_progress": report})

    def abort_requests(self, ids: Sequence[str]) -> None:
        super().abort_requests(ids)
        (self.told_again if self.told.is_set() else self.told).set()


def test_an_engine_that_was_asked_before_it_had_the_request_is_asked_again() -> None:
    """Else one that was given its requests late computes them to their end, though nobody wants them any more."""
    quick, slow = (replace(r, group_id=i) for i, r in enumerate(make_requests(1)[:2]))
    slow = replace(slow, sampling=replace(slow.sampling, max_new_tokens=40))
    late = Late()
    driver = Driver(
        cast("list[Engine]", [FakeEngine(), late]),
        notify=lambda trajectory: None,
        report_tokens=1,
        is_enough=enough(1),
    )
    driver.run([[quick], [slow]])
    assert set(driver.done) == {quick.request_id}
    assert set(driver.stopped) == {slow.request_id}
    assert late.num_aborts == 2


def test_what_has_been_heard_of_is_asked_to_end_once() -> None:
    """An engine that has reported has the request: no second round trip for each of the many that are stopped."""
    quick, slow = (replace(r, group_id=i) for i, r in enumerate(make_requests(1)[:2]))
    slow = replace(slow, sampling=replace(slow.sampling, max_new_tokens=10**6))
    heard = threading.Event()

    class Second(FakeEngine):
        def generate(self, requests: Sequence[RolloutRequest], **more: Any) -> None:
            heard.wait(20)
            super().generate(requests, **more)

    engine, other = Second(), FakeEngine()
    driver = Driver(cast("list[Engine]", [engine, other]), notify=lambda trajectory: None, is_enough=enough(1))
    progressed = driver._progressed

    def see(engine: int, request: RolloutRequest, so_far: Trajectory) -> None:
        progressed(engine, request, so_far)
        heard.set()

    driver._progressed = see  # type: ignore[method-assign]
    driver.run([[quick], [slow]])
    assert set(driver.stopped) == {slow.request_id}
    assert other.num_aborts == 1


def test_an_error_of_an_engine_ends_the_others() -> None:
    class Refusing(FakeEngine):
        def generate(self, *_: Any, **__: Any) -> None:
            raise EngineError("refused")

    engines = [FakeEngine(), Refusing()]
    with pytest.raises(EngineError, match="refused"):
        drive(engines, make_requests(1))
    assert engines[0].killed
