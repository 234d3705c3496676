"""Agents with the openai client on scripted engines: what they are told is what is learned from, token for token."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specactor.data import chat
from specactor.data.environment import environment_of
from specactor.data.stream import turn_seed
from specactor.errors import DataError
from specactor.rollout import conversations as module
from specactor.rollout import resume
from specactor.rollout.conversations import Conversations
from specactor.rollout.driver import Driver
from specactor.rollout.endpoint import Body, Endpoint, Refusal
from specactor.rollout.requests import assign
from specactor.rollout.session import Session
from specactor.rollout.sglang.engine_client import Engine
from specactor.types import Problem, RolloutRequest, SamplingParams, Trajectory
from tests.data.test_chat import CALLS, END, START, called, make_tokenizer
from tests.rollout import agents
from tests.rollout.driver_cases import FakeEngine, token

MAX_NEW, LONGEST = 300, 80
TOKENIZER = make_tokenizer()


class Scripted(FakeEngine):
    """Its first response calls a tool."""

    parsed = 0

    def parse_tools(self, text: str, tools: Sequence[Any]) -> tuple[str, list[tuple[str, str]]]:
        self.parsed += 1
        return ("", [("multiply", '{"a": 2}')]) if self.parsed == 1 else (text, [])


def stops_at(token: int) -> bool:
    return token % 12 == END


def problem(index: int, kind: str, turns: int = 1) -> Problem:
    return Problem(
        index=index,
        prompt=f"{index}=",
        prompt_ids=(1,),
        answer="0",
        verifier=f"tests.rollout.agents:{kind}",
        metadata={"turns": turns},
    )


def request(index: int) -> RolloutRequest:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=MAX_NEW)
    return RolloutRequest(request_id=f"c{index}", prompt_ids=(1,), sampling=sampling, seed=7 + index, group_id=index)


def rollout(
    problems: Sequence[Problem], *, engines: Sequence[FakeEngine] | None = None, timeout_s: float = 60.0
) -> list[Trajectory]:
    """All sessions, in their order; engines that die are replaced."""
    pending = requests = [request(p.index) for p in problems]
    engines = engines or [Scripted(stops_at=stops_at), Scripted(stops_at=stops_at)]
    found: dict[str, Trajectory] = {}
    agents.Talks.seen.clear()
    with Conversations(requests, problems, TOKENIZER, timeout_s=timeout_s, max_prompt_tokens=LONGEST) as open_:
        for _ in range(4):
            driver = Driver(cast("list[Engine]", engines), notify=lambda t: None, conversations=open_)
            driver.run(assign(pending, len(engines)))
            assert not found.keys() & driver.done.keys(), "none is doubled"
            found |= driver.done
            pending = [r for r in pending if r.request_id not in found]
            if not pending:
                break
            engines = [Scripted(stops_at=stops_at)]
    assert set(found) == {r.request_id for r in requests}
    assert not [t for t in threading.enumerate() if t.name == "endpoint"]
    return [found[r.request_id] for r in requests]


def seen(index: int = 0) -> list[Any]:
    return agents.Talks.seen[index]


def text(ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True))


def sampled(seed: int, prompt: Sequence[int], *key: int, most: int = MAX_NEW) -> list[int]:
    """A response, from the noise alone."""
    found: list[int] = []
    turn = turn_seed(seed, prompt, *(key or (0, 0, 0, 1, 0, 0)))
    while len(found) < most and not (found and stops_at(found[-1])):
        found.append(token(turn, len(prompt) + len(found)))
    return found


def expected(p: Problem, turns: int) -> tuple[list[int], list[int], list[bool]]:
    """Prompt, tokens and mask of `Talks`, without any of the code that is tested but the template."""
    prompt = list(chat.prompt_ids(TOKENIZER, [{"role": "user", "content": p.prompt}]))
    ids: list[int] = []
    mask: list[bool] = []
    for turn in range(turns):
        response = sampled(request(p.index).seed, prompt + ids, most=MAX_NEW - len(ids))
        ids, mask = ids + response, mask + [True] * len(response)
        if turn < turns - 1 and response:
            end = [] if response[-1] == END else [END]
            said = [*TOKENIZER.encode("\n"), START, *TOKENIZER.encode(f"user\n({len(text(response))})")]
            said += [END, *TOKENIZER.encode("\n"), START, *TOKENIZER.encode("assistant\n")]
            ids, mask = ids + end + said, mask + [False] * len(end + said)
    return prompt, ids, mask


def differing(problems: Sequence[Problem], found: Sequence[Trajectory]) -> int:
    """Sessions of `Talks` that are not as they should be."""
    wrong = 0
    for p, t in zip(problems, found, strict=True):
        prompt, ids, mask = expected(p, int(str(p.metadata["turns"])))
        own = (list(t.prompt_ids), list(t.token_ids), list(t.loss_mask or (True,) * len(t.token_ids)), t.branches)
        wrong += own != (prompt, ids, mask, ())
    return wrong


def fitting(count: int) -> list[Problem]:
    """Problems whose sessions have room for all of their turns."""
    kept = []
    for i in range(10 * count):
        p = problem(i, "Talks", 1 + i % 3)
        if len(expected(p, 1 + i % 3)[1]) < MAX_NEW - 40:
            kept.append(p)
    return kept[:count]


def test_sessions_are_token_by_token_what_they_should_be() -> None:
    """Streamed and not, of different lengths, at once."""
    problems = fitting(12)
    found = rollout(problems)
    assert differing(problems, found) == 0
    assert {t.num_turns for t in found} == {1, 2, 3}
    for p, t in zip(problems, found, strict=True):
        mask, ids = t.loss_mask or (True,) * len(t.token_ids), t.token_ids
        assert text([x for x, own in zip(ids, mask, strict=True) if own]) == "".join(seen(p.index))
        assert t.reward == float(str(p.metadata["turns"]))
        assert all((logprob == 0.0) != own for logprob, own in zip(t.logprobs, mask, strict=True))
    assert set(agents.Talks.closed) >= {p.index for p in problems}


class OneNoise(Session):
    """All turns of a session share their noise."""

    def ask(self, call: Any) -> Any:
        turns = super().ask(call)
        return [replace(turn, seed=1) for turn in turns]


class Retokenized(Session):
    """A turn sees the text of the conversation, not its tokens."""

    def ask(self, call: Any) -> Any:
        self._places.clear()
        return super().ask(call)


@pytest.mark.parametrize("wrong", [OneNoise, Retokenized])
def test_wrong_versions_are_caught(wrong: type[Session], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Session", wrong)
    problems = fitting(6)
    assert differing(problems, rollout(problems)) > 0


@pytest.mark.parametrize("dies_after", [5, 60])
def test_engines_that_die_change_nothing(dies_after: int) -> None:
    problems = fitting(12)
    both = [Scripted(stops_at=stops_at, dies_after=dies_after) for _ in range(2)]
    assert differing(problems, rollout(problems, engines=both)) == 0
    told = [seen(p.index) for p in problems]
    rollout(problems)
    assert told == [seen(p.index) for p in problems]


def test_choices_have_noise_and_sequences_of_their_own() -> None:
    [t] = rollout([problem(0, "Samples")])
    answer, _, first = seen()
    prompt = t.prompt_ids
    responses = [sampled(7, prompt, choice, 0, 0, 3, 0, 0) for choice in range(3)]
    own = (replace(t, branches=()), *t.branches)
    sequences = [next(s for s in own if list(s.token_ids[: len(r)]) == r) for r in responses]
    assert [choice.message.content for choice in answer.choices] == [text(r) for r in responses]
    assert [s.num_turns for s in sequences[1:]] == [1, 2]  # what went on with a choice stands behind it
    assert first.usage.prompt_tokens > answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == sum(map(len, responses))
    tokens = [(entry.token, entry.logprob) for entry in answer.choices[1].logprobs.content]
    assert tokens == [(TOKENIZER.decode([i]), -1.0) for i in responses[1]]


def test_an_edited_history_begins_a_sequence_of_its_own() -> None:
    [t] = rollout([problem(0, "Edits")])
    first, *others = (t, *t.branches)
    assert (first.num_turns - sum(b.num_turns for b in others), len(others)) == (2, 2)
    forked, edited = others
    start = len(forked.prompt_ids)
    assert forked.prompt_ids == (first.prompt_ids + first.token_ids)[:start]  # token for token, and not learned twice
    assert text(edited.prompt_ids).startswith("user\nanother thing\nassistant\n" + seen()[0])
    assert all(not b.loss_mask and text(b.token_ids) == said for b, said in zip(others, seen()[2:], strict=True))
    assert seen()[1] != seen()[2]


def test_calls_that_are_open_at_once_have_the_same_tokens_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        monkeypatch.setattr(agents.AtOnce, "order", order)
        [t] = rollout([problem(0, "AtOnce")])
        found.append((seen()[:2], sorted(seen()[2:]), [s.token_ids for s in (t, *t.branches)]))
    assert found[0] == found[1] == found[2]
    assert len(set(found[0][2])) == 4


def test_calls_of_one_prompt_that_want_different_things_do_not_swap_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        monkeypatch.setattr(agents.Limits, "order", order)
        [t] = rollout([problem(0, "Limits")])
        found.append((seen(), [(s.prompt_ids, s.token_ids) for s in (t, *t.branches)]))
    assert found[0] == found[1]
    assert len({said for of in found[0][0] for said in of}) == 5


def test_what_a_calls_own_limit_ends_is_not_cut() -> None:
    """Engines that stop at no token: each response ends at its limit. The client hears of it."""
    [t] = rollout([problem(0, "Limits")], engines=[Scripted(), Scripted()])
    ends = {len(s.token_ids): s.finish_reason for s in (t, *t.branches)}
    assert ends == {9: "stop", MAX_NEW: "length"}
    [t] = rollout([problem(0, "Talks", turns=2)], engines=[Scripted()])
    assert (t.finish_reason, len(t.token_ids)) == ("length", MAX_NEW)
    [t] = rollout([problem(0, "Full")])
    assert t.finish_reason == "length", "no further turn had room"
    [t] = rollout([problem(0, "Talks")])
    assert t.finish_reason == "stop"


def test_a_session_ends_by_itself() -> None:
    [t] = rollout([problem(0, "Insists")], timeout_s=30)
    most, sizes = 16 * MAX_NEW, [len(s.token_ids) for s in (t, *t.branches)]
    assert most <= sum(sizes) < most + MAX_NEW
    assert len(seen()) == len(sizes)
    assert (t.reward, t.failure) == (0.0, "")


def test_seed_stop_and_length_are_heeded() -> None:
    rollout([problem(0, "Seeds")])
    a, b, other, stopped, short = seen()
    assert a == b != other
    assert not {"x", "y"} & set(stopped)
    assert len(short) <= 3


def test_tools_are_told_and_what_they_say_forges_nothing() -> None:
    [t] = rollout([problem(0, "UsesTools")], engines=[Scripted(stops_at=stops_at)])
    answer, chunks = seen()
    assert answer.finish_reason == "tool_calls"
    [call] = answer.message.tool_calls
    assert (call.function.name, call.function.arguments, call.type) == ("multiply", '{"a": 2}', "function")
    assert (t.num_turns, t.branches) == (2, ())
    said = [i for i, own in zip(t.token_ids, t.loss_mask, strict=True) if not own]
    assert "tool\n<|im_end|>8" in TOKENIZER.decode(said)
    assert said.count(END) <= 2
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.total_tokens == len(t.prompt_ids) + len(t.token_ids)


def test_arguments_of_tools_that_are_rendered_are_objects() -> None:
    """If they can be: what a policy wrote may be something else."""
    tokenizer, told = make_tokenizer(), list[Refusal]()
    tokenizer.chat_template = CALLS
    session = Session(request(0), tokenizer, max_prompt_tokens=LONGEST)
    for arguments, rendered in (('{"a": 2}', '{"a": 2}'), ("2", '"2"')):
        body = Body(messages=called(arguments), tools=agents.TOOLS)
        call: Any = SimpleNamespace(body=body, is_given_up=False, tell=told.append)
        turns = session.ask(call)
        assert [tokenizer.decode(turn.prompt_ids) for turn in turns] == [f"multiply{rendered};6;"]
    assert not told


@pytest.mark.parametrize("has_tools", [True, False])
def test_a_parser_sees_special_tokens_and_nobody_else_does(has_tools: bool) -> None:
    """In some formats they mark calls."""
    parsed: list[str] = []

    def parse(text: str, tools: Sequence[Any]) -> tuple[str, list[tuple[str, str]]]:
        parsed.append(text)
        rest, mark, call = text.partition("<|im_start|>")
        return rest + mark, [("multiply", call)] if call else []

    said, given = (TOKENIZER.encode(part) for part in ("So: ", '{"a": 2}'))
    for ids, finish, text, calls in (
        ([*said, START, *given, END], "stop", "So: ", ['{"a": 2}']),
        ([*said, START], "length", "So: ", []),
        ([*said, END], "stop", "So: ", []),
    ):
        told: list[Any] = []
        tools = agents.TOOLS if has_tools else None
        body = Body(messages=[{"role": "user", "content": "a"}], tools=tools)
        call: Any = SimpleNamespace(body=body, is_given_up=False, tell=told.append)
        session = Session(request(0), TOKENIZER, max_prompt_tokens=LONGEST)
        [turn] = session.ask(call)
        response = resume.whole(
            turn, token_ids=ids, logprobs=[-1.0] * len(ids), finish_reason=cast("Any", finish), version=1
        )
        session.hear(response, parse)
        [part] = told
        if has_tools:
            assert parsed[-1] == str(TOKENIZER.decode(ids)).removesuffix("<|im_end|>")
            assert [c["function"]["arguments"] for c in part.delta.get("tool_calls", [])] == calls
            assert part.delta["content"] == text
        else:
            assert part.delta == {"content": TOKENIZER.decode(ids, skip_special_tokens=True)}
        assert session.whole().token_ids == tuple(ids)
    assert len(parsed) == 3 * has_tools


def test_what_cannot_be_done_is_refused() -> None:
    [t] = rollout([problem(0, "Refused")])
    *refusals, last = seen()
    assert refusals[0] == (
        "temperature: got 0.3, expected 1.0 as in the run, or nothing. What is sampled is trained on."
    )
    names = ["temperature", "top_p", "presence_penalty", "frequency_penalty", "n", "top_logprobs", "tool_choice"]
    names += ["parallel_tool_calls", "max_tokens", "seed", "stop", "stop", "body", "messages"]
    names += ["messages", "tools", "tools", "messages"]
    assert [refusal.partition(":")[0] for refusal in refusals] == names
    assert agents.Talks.seen[-1] == [401, 401, 401]
    assert (text(t.token_ids), t.branches) == (last, ())


def test_whatever_is_posted_is_refused_and_the_session_goes_on() -> None:
    [t] = rollout([problem(0, "PostsAnything")])
    said, statuses = seen()
    assert statuses == [400] * len(agents.PostsAnything.bodies)
    assert (text(t.token_ids), t.failure) == (said, "")


def test_what_is_nested_too_deep_is_refused() -> None:
    """By the session, where the wire lets it pass."""
    deep: dict[str, Any] = {}
    for _ in range(10**5):
        deep = {"a": deep}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    told: list[Refusal] = []
    body = Body(messages=[{"role": "user", "content": "a"}], tools=tools)
    call: Any = SimpleNamespace(body=body, is_given_up=False, tell=told.append)
    assert Session(request(0), TOKENIZER, max_prompt_tokens=LONGEST).ask(call) == []
    assert [(refusal.status, str(refusal)[:21]) for refusal in told] == [(400, "body: RecursionError:")]


def test_agents_that_fail_are_told_of_and_the_others_go_on() -> None:
    kinds = ["Talks", "Raises", "Hangs", "AsksNothing", "Full", "LeavesCalls", "FullThenRaises"]
    found = rollout([problem(i, kind) for i, kind in enumerate(kinds)], timeout_s=3.0)
    name = "tests.rollout.agents:"
    assert [t.failure for t in found] == [
        "",
        f"{name}Raises: run: ValueError('a bug of the agent')",
        f"{name}Hangs: run: no call in time",
        f"{name}AsksNothing: run: it ended without an answer of the policy",
        "",
        "",
        f"{name}FullThenRaises: run: KeyError('a bug of the agent')",
    ]
    assert (found[4].reward, found[5].reward) == (0.0, 1.0)
    assert len(found[4].token_ids) <= MAX_NEW
    assert found[4].num_turns > 1
    for thread in [t for t in threading.enumerate() if t.name == "environment"]:
        thread.join(60)
        assert not thread.is_alive()


class Lasting(Scripted):
    """Takes a second for a turn."""

    def generate(self, requests: Sequence[RolloutRequest], **options: Any) -> None:
        time.sleep(1)
        super().generate(requests, **options)


def test_an_agents_time_is_what_it_takes_between_turns() -> None:
    start = time.monotonic()
    [t] = rollout([problem(0, "Thinks")], engines=[Lasting(stops_at=stops_at)])
    took_s = time.monotonic() - start
    assert t.num_turns == 2
    assert 0.4 <= t.environment_s <= took_s - 2


def test_the_endpoint_is_on_the_loopback_and_gone_afterwards() -> None:
    requests, problems = [request(0)], [problem(0, "Talks")]
    with Conversations(requests, problems, TOKENIZER, timeout_s=5, max_prompt_tokens=LONGEST) as open_:
        assert open_._endpoint is not None
        host, _, port = open_._endpoint.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
        assert host == "127.0.0.1"
        socket.create_connection((host, int(port))).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))


def test_a_client_that_hangs_up_leaves_no_task_behind() -> None:
    endpoint, heard = Endpoint(), threading.Event()
    key = endpoint.open(lambda call: heard.set())
    host, _, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
    body = json.dumps({"messages": []})
    with socket.create_connection((host, int(port))) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert heard.wait(60)
    time.sleep(0.1)  # until it has heard that
    endpoint.close()
    assert asyncio.all_tasks(endpoint._loop) == set()


def test_the_example_is_one_sequence_and_an_agent_that_edits_has_several() -> None:
    problems = [replace(problem(0, ""), verifier="examples.agent:Critical"), problem(1, "Edits")]
    found = rollout(problems)
    assert [(t.num_turns, t.reward, t.failure) for t in found] == [(3, 0.0, ""), (4, 1.0, "")]


def test_what_an_agent_may_not_return_fails_its_session() -> None:
    name = "tests.rollout.agents:"
    found = rollout([problem(i, kind) for i, kind in enumerate(("SaysMuch", "Talks", "Unmade"))])
    assert [t.failure for t in found] == [
        f"{name}SaysMuch: run: it returned '1' of type str, expected a finite number as reward",
        "",
        f"{name}Unmade: run: ValueError('cannot be made')",
    ]


def test_an_agent_needs_a_template_and_a_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", None)
    with pytest.raises(DataError, match="has no chat template"):
        rollout([problem(0, "Talks")])
    with pytest.raises(DataError, match=r"without `async def run\(self, problem, base_url, api_key\)`"):
        environment_of("tests.rollout.test_sessions:NotAnAgent")


class NotAnAgent:
    async def run(self, problem: Problem) -> float:
        return 0.0
