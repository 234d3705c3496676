"""A call that its client gave up leaves nothing to learn from, and the next one goes on as if it had not been made."""

from __future__ import annotations

import asyncio
import http.client
import json
import queue
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specactor.rollout import endpoint as module
from specactor.rollout import resume
from specactor.rollout.child_process import ChildDied
from specactor.rollout.conversations import Conversations
from specactor.rollout.driver import Driver
from specactor.rollout.endpoint import Body, ChatCall, Endpoint, Part, Refusal
from specactor.rollout.session import MAX_SEQUENCES, Session
from specactor.rollout.sglang.engine_client import Engine
from specactor.types import RolloutRequest, Trajectory
from tests.rollout import agents
from tests.rollout.driver_cases import enough
from tests.rollout.test_sessions import (
    LONGEST,
    MAX_NEW,
    TOKENIZER,
    Scripted,
    differing,
    expected,
    fitting,
    problem,
    request,
    rollout,
    stops_at,
)


class Holds(Scripted):
    """Holds a prompt that it has not seen until the request is aborted, or another of that prompt answered."""

    def __init__(self, *, heeds_aborts: bool = True) -> None:
        super().__init__(stops_at=stops_at)
        self.heeds_aborts, self.held, self.answered = heeds_aborts, list[RolloutRequest](), set[tuple[int, ...]]()

    def generate(self, requests: Sequence[RolloutRequest], **how: Any) -> None:
        [one] = requests
        with self.lock:
            if is_new := one.prompt_ids not in {held.prompt_ids for held in self.held}:
                self.held.append(one)
        until = time.monotonic() + 60
        while is_new and one.request_id not in self.aborted and one.prompt_ids not in self.answered:
            assert time.monotonic() < until
            time.sleep(0.01)
        if is_new and self.heeds_aborts and one.request_id in self.aborted:
            how["on_finished"](cut(one))
            return
        super().generate(requests, **how)
        self.answered.add(one.prompt_ids)

    def wait_for_abort(self, one: RolloutRequest) -> None:
        until = time.monotonic() + 60
        while one.request_id not in self.aborted:
            assert time.monotonic() < until, "nobody asked"
            time.sleep(0.01)


def cut(one: RolloutRequest) -> Trajectory:
    return resume.whole(one, token_ids=[5, 6], logprobs=[-1.0, -1.0], finish_reason="abort", version=1)


@pytest.mark.parametrize("heeds_aborts", [True, False], ids=["aborted", "too late to abort"])
def test_what_a_client_gave_up_and_asked_again_is_learned_from_once(heeds_aborts: bool) -> None:
    """To the token as if it had been patient, in each turn."""
    [*_, p] = fitting(3)
    problems, engine = [replace(p, verifier="tests.rollout.agents:GivesUp")], Holds(heeds_aborts=heeds_aborts)
    found = rollout(problems, engines=[engine])
    assert differing(problems, found) == 0
    assert (found[0].num_turns, len(engine.held)) == (3, 3)
    assert not heeds_aborts or {held.request_id for held in engine.held} <= engine.aborted


def test_an_agent_that_gives_up_its_call_has_as_long_for_the_next_as_others() -> None:
    [t] = rollout([problem(0, "GivesUpAndHangs")], engines=[Holds()], timeout_s=2.0)
    assert t.failure == "tests.rollout.agents:GivesUpAndHangs: run: no call in time"


class DiesOfTheAbort(Holds):
    """Dies with a call that its client has given up."""

    def generate(self, requests: Sequence[RolloutRequest], **how: Any) -> None:
        self.wait_for_abort(requests[0])
        self.alive = False
        raise ChildDied("died")


class AnswersWhenTold(Scripted):
    def __init__(self) -> None:
        super().__init__(stops_at=stops_at)
        self.told = threading.Event()

    def generate(self, requests: Sequence[RolloutRequest], **how: Any) -> None:
        until = time.monotonic() + 60
        while not self.told.wait(0.01) and not self.killed:
            assert time.monotonic() < until
        super().generate(requests, **how)


def test_an_agent_whose_given_up_call_was_lost_with_its_engine_is_still_waited_for() -> None:
    """It fails in its time; another engine works on until then."""
    problems, other = [problem(0, "GivesUpAndHangs"), problem(1, "Talks")], AnswersWhenTold()
    requests, engines = [request(p.index) for p in problems], [DiesOfTheAbort(), other]
    with Conversations(requests, problems, TOKENIZER, timeout_s=2, max_prompt_tokens=LONGEST) as conversations:
        driver = Driver(
            cast("list[Engine]", engines),
            notify=lambda t: other.told.set() if t.request_id == "c0" else None,
            conversations=conversations,
        )
        driver.run([requests[:1], requests[1:]])
    assert {name: t.failure for name, t in driver.done.items()} == {
        "c0": "tests.rollout.agents:GivesUpAndHangs: run: no call in time",
        "c1": "",
    }


class HeedsTheSecondAbort(Holds):
    """Was not given its request when it was asked to end that, and passed over it."""

    def generate(self, requests: Sequence[RolloutRequest], **how: Any) -> None:
        [one] = requests
        agents.HangsUp.reached.set()
        self.wait_for_abort(one)
        self.aborted.clear()
        assert how["report_tokens"]
        how["on_progress"](one, cut(one))
        self.wait_for_abort(one)
        how["on_finished"](cut(one))
        agents.HangsUp.ended.set()


def test_a_given_up_call_is_ended_though_the_engine_was_asked_too_early() -> None:
    """Before its session is, at whose end all calls are ended."""
    problems, requests, engine = [problem(0, "HangsUp")], [request(0)], HeedsTheSecondAbort()
    agents.HangsUp.reached.clear()
    agents.HangsUp.ended.clear()
    with Conversations(requests, problems, TOKENIZER, timeout_s=120, max_prompt_tokens=LONGEST) as conversations:
        driver = Driver(
            cast("list[Engine]", [engine]), notify=lambda t: None, conversations=conversations, is_enough=enough(2)
        )
        driver.run([requests])
    assert driver.done["c0"].failure == "tests.rollout.agents:HangsUp: run: it ended without an answer of the policy"
    assert engine.num_aborts == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_answered", [0, 1, 2])
def test_the_endpoint_tells_of_clients_that_hang_up_before_their_answer(stream: bool, num_answered: int) -> None:
    taken: queue.Queue[ChatCall] = queue.Queue()
    endpoint = Endpoint()
    base_url, key = endpoint.base_url, endpoint.open(taken.put)
    host, _, port = base_url.removeprefix("http://").removesuffix("/v1").partition(":")
    body = json.dumps({"messages": [], "n": 2, "stream": stream})
    with socket.create_connection((host, int(port)), timeout=60) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        call = taken.get(timeout=60)
        for choice in range(num_answered):
            call.tell(Part(choice=choice, delta={"content": "a"}, finish_reason="stop"))
        if num_answered == 2:
            assert client.recv(1)
    if num_answered < 2:
        assert taken.get(timeout=60) is call
    endpoint.close()
    assert call.is_given_up == (num_answered < 2)
    assert taken.empty()


def begun() -> Session:
    return Session(request(0), TOKENIZER, max_prompt_tokens=LONGEST)


def made(*said: str, **options: Any) -> ChatCall:
    loop = asyncio.new_event_loop()
    loop.close()  # nobody waits
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    return ChatCall(body=Body(messages=messages, **options), loop=loop)


def answer(session: Session, turn: RolloutRequest, text: str = "yes") -> None:
    ids = TOKENIZER.encode(text)
    session.hear(
        resume.whole(turn, token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason="stop", version=1),
        lambda text, tools: (text, []),
    )


def give_up(session: Session, call: ChatCall) -> None:
    call.is_given_up = True
    assert session.ask(call) == []


def facts(t: Trajectory) -> Any:
    return [(s.prompt_ids, s.token_ids, s.seed, s.loss_mask) for s in (t, *t.branches)]


@pytest.mark.parametrize("num_heard", [0, 1, 2])
def test_answers_that_were_heard_and_not_sent_are_taken_back(num_heard: int) -> None:
    """In the midst of a sequence, which goes on from there with the same noise."""
    found = []
    for gives_up in (True, False):
        session = begun()
        [first] = session.ask(made("a"))
        answer(session, first)
        if gives_up:
            call = made("a", "yes", "b", n=2)
            turns = session.ask(call)
            for turn in turns[:num_heard]:
                answer(session, turn, "maybe")
            give_up(session, call)
            for turn in turns[num_heard:]:
                answer(session, turn, "late")
        turns = session.ask(made("a", "yes", "b", n=2))
        for turn in turns:
            answer(session, turn, "no")
        [last] = session.ask(made("a", "yes", "b", "no", "c"))
        answer(session, last)
        found.append((facts(session.whole()), [(turn.prompt_ids, turn.seed, turn.num_earlier) for turn in turns]))
        [edits] = session.ask(made("a", "yes", "b", "maybe", "c"))
        assert edits.num_earlier == 0, "what was taken back is not gone on from"
    assert found[0] == found[1]


def test_no_two_turns_share_noise_whichever_was_given_up() -> None:
    session, calls = begun(), [made("a"), made("a"), made("a")]
    turns = [turn for call in calls for turn in session.ask(call)]
    give_up(session, calls[0])
    turns += session.ask(made("a"))
    assert len({turn.seed for turn in turns}) == 4, "the second is still open"
    give_up(session, calls[2])
    turns += session.ask(made("a"))
    assert len({turn.seed for turn in turns}) == 5, "and so was one before"


def test_a_session_that_only_hangs_up_ends_by_itself() -> None:
    session, told, count = begun(), list[Refusal](), 0
    body = made("a").body
    while not told:
        call: Any = SimpleNamespace(body=body, is_given_up=False, tell=told.append)
        session.ask(call)
        give_up(session, call)
        count += 1
    assert told[0].code == "session_over"
    assert count == MAX_SEQUENCES * MAX_NEW + 1


def test_a_given_up_call_that_stays_would_be_seen() -> None:
    """As a branch, of the session's reward."""
    [p] = fitting(1)
    session, prompt = begun(), expected(p, 1)[0]
    [first, second] = [turn for _ in range(2) for turn in session.ask(made(p.prompt))]
    assert first.prompt_ids == second.prompt_ids == tuple(prompt)
    for turn in (first, second):
        answer(session, turn)
    assert len(session.whole().branches) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_hears_something_while_a_long_answer_is_generated(stream: bool) -> None:
    """OpenAI's hangs up after 600 seconds without a byte."""
    answer, first = asked(stream=stream, with_answer=Part(choice=0, delta={"content": "late"}, finish_reason="stop"))
    if stream:
        events = [line.removeprefix(b"data: ") for line in answer.split(b"\n\n") if line.startswith(b"data: ")]
        assert (first, events[-1]) == (b":", b"[DONE]")
        assert json.loads(events[0])["choices"][0]["delta"]["content"] == "late"
    else:
        assert first == b" "
        assert json.loads(answer)["choices"][0]["message"]["content"] == "late"


def test_a_refusal_that_comes_late_is_no_answer() -> None:
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        asked(stream=False, with_answer=Refusal("it is over"))


def asked(*, stream: bool, with_answer: Part | Refusal) -> tuple[bytes, bytes]:
    """Return an answer that is told after its first byte, and that byte."""
    taken: queue.Queue[ChatCall] = queue.Queue()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ANSWER_S", 0.1)
        endpoint = Endpoint()
        headers = {"Authorization": f"Bearer {endpoint.open(taken.put)}"}
        client = http.client.HTTPConnection(endpoint.base_url.split("/")[2], timeout=60)
        client.request("POST", "/v1/chat/completions", json.dumps({"messages": [], "stream": stream}), headers)
        response = client.getresponse()
        first = response.read(1)
        taken.get(timeout=60).tell(with_answer)
        try:
            return first + response.read(), first
        finally:
            client.close()
            endpoint.close()
