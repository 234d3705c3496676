"""An agent whose conversation is over ends, whatever its thread was about to do."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from specactor.rollout import conversations as module
from specactor.rollout.conversations import Conversations
from tests.rollout import agents
from tests.rollout.test_sessions import LONGEST, TOKENIZER, problem, request


@pytest.mark.parametrize("when", ["before it has a loop", "before its loop runs", "while it runs"])
def test_an_agent_that_is_dropped_ends_though_it_makes_no_call(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there, goes_on = threading.Event(), threading.Event()
    start, bounded = threading.Thread.start, module._bounded
    held: list[threading.Thread] = []

    def hold(*arguments: Any) -> Any:
        there.set()
        assert goes_on.wait(60)
        return bounded(*arguments)

    if when == "before it has a loop":
        there.set()
        monkeypatch.setattr(
            threading.Thread, "start", lambda self: held.append(self) if self.name == "environment" else start(self)
        )
    elif when == "before its loop runs":
        monkeypatch.setattr(module, "_bounded", hold)
    else:
        there = agents.Waits.runs
        there.clear()
    told = threading.Event()
    with Conversations(
        [request(0)], [problem(0, "Waits")], TOKENIZER, timeout_s=60, max_prompt_tokens=LONGEST
    ) as open_:
        open_.ask("c0", None, lambda answer: told.set())
        assert there.wait(60)
        open_.drop("c0")
        goes_on.set()
        monkeypatch.undo()
        for thread in held:
            thread.start()
        assert told.wait(60), "it was not cancelled"
    for thread in [t for t in threading.enumerate() if t.name == "environment"]:
        thread.join(60)
        assert not thread.is_alive()


def test_an_agent_that_is_dropped_when_it_has_just_ended_is_released() -> None:
    """Its cancellation finds nothing but `close`, which it must not end."""
    agents.Blocks.runs.clear()
    agents.Blocks.goes_on.clear()
    agents.Blocks.closed.clear()
    told: list[str] = []
    with Conversations(
        *([request(0)], [problem(0, "Blocks")], TOKENIZER),
        timeout_s=60,
        max_prompt_tokens=LONGEST,
        unreleased=told.append,
    ) as open_:
        one = open_._open["c0"]
        one.lock = threading.RLock()  # type: ignore[assignment]
        open_.ask("c0", None, lambda answer: None)
        assert agents.Blocks.runs.wait(60)
        assert one.loop is not None
        with one.lock:  # for which its thread waits when `run` is over
            agents.Blocks.goes_on.set()
            until = time.monotonic() + 60
            while one.loop.is_running():
                assert time.monotonic() < until
                time.sleep(0.01)
            open_.drop("c0")
        for thread in [t for t in threading.enumerate() if t.name == "environment"]:
            thread.join(60)
    assert (agents.Blocks.closed, told) == ([0], [])
