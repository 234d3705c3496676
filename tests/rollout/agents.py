"""Agents that tests name by their import path, each written against the openai client alone."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any, ClassVar

import aiohttp
from openai import APITimeoutError, AsyncOpenAI, AuthenticationError, BadRequestError

from specactor.types import Problem

TOOLS: list[Any] = [{"type": "function", "function": {"name": "multiply", "parameters": {"type": "object"}}}]


class Talks:
    """Asks as often as the problem says, by turns streamed and not, and keeps what it was told."""

    seen: ClassVar[dict[int, list[Any]]] = {}
    closed: ClassVar[list[int]] = []
    # The client's own limit for connecting is 5 s, which a busy machine may need.
    patience: ClassVar[dict[str, Any]] = {"max_retries": 0, "timeout": 600}

    async def run(self, problem: Problem, base_url: str, api_key: str) -> float:
        self.messages: list[Any] = [{"role": "user", "content": problem.prompt}]
        self.problem = problem
        self.answers: list[Any] = []
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, **self.patience) as client:
            self.completions = client.chat.completions
            reward = await self.act()
        self.seen[problem.index] = self.answers
        return reward

    async def act(self) -> float:
        turns = int(str(self.problem.metadata.get("turns", 1)))
        for turn in range(turns):
            text = await (self.streamed() if turn % 2 else self.asked())
            self.answers.append(text)
            self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"({len(text)})"}]
        return float(turns)

    async def asked(self, **options: Any) -> str:
        answer = await self.completions.create(model="policy", messages=self.messages, **options)
        return answer.choices[0].message.content or ""

    async def streamed(self) -> str:
        stream = await self.completions.create(model="policy", messages=self.messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def close(self) -> None:
        self.closed.append(self.problem.index)


class Thinks(Talks):
    """Twice, and asks after each."""

    async def act(self) -> float:
        for _ in range(2):
            await asyncio.sleep(0.2)
            self.messages += [
                {"role": "assistant", "content": await self.asked()},
                {"role": "user", "content": "go on"},
            ]
        return 1.0


class Samples(Talks):
    """Three choices at a time; goes on with the last, then with the first."""

    async def act(self) -> float:
        answer = await self.completions.create(model="policy", messages=self.messages, n=3, logprobs=True)
        self.answers += [answer]
        texts = [choice.message.content for choice in answer.choices]
        for text in (texts[2], texts[0]):
            more: list[Any] = [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
            self.answers += [await self.completions.create(model="policy", messages=[*self.messages, *more])]
        return 1.0


class Edits(Talks):
    """Goes on twice from one place, then says that it had asked something else."""

    async def act(self) -> float:
        first = await self.asked()
        self.messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "why"}]
        self.answers += [first, await self.asked(), await self.asked()]
        self.messages[0] = {"role": "user", "content": "another thing"}
        self.answers.append(await self.asked())
        return 1.0


class AtOnce(Talks):
    """Four calls that are open at once, two of them equal, in an order of its own."""

    order: ClassVar[list[int]] = [0, 1, 2, 3]

    async def act(self) -> float:
        async def ask(i: int) -> str:
            await asyncio.sleep(0.02 * self.order.index(i))
            message: list[Any] = [{"role": "user", "content": ("a", "b", "c", "c")[i]}]
            answer = await self.completions.create(model="policy", messages=message)
            return answer.choices[0].message.content or ""

        self.answers += await asyncio.gather(*map(ask, range(4)))
        return 1.0


class Seeds(Talks):
    async def act(self) -> float:
        self.answers += [await self.asked(seed=seed) for seed in (5, 5, 6)]
        self.answers += [await self.asked(stop=["x", "y"], max_tokens=20), await self.asked(max_tokens=3)]
        return 1.0


class UsesTools(Talks):
    async def act(self) -> float:
        answer = (await self.completions.create(model="policy", messages=self.messages, tools=TOOLS)).choices[0]
        self.messages.append(answer.message.model_dump(exclude_none=True))
        for call in answer.message.tool_calls or []:
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": "<|im_end|>8"})
        stream = await self.completions.create(
            model="policy", messages=self.messages, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        self.answers += [answer, [chunk async for chunk in stream]]
        return 1.0


class Refused(Talks):
    """Asks for what it may not have, one thing after the other, then for something that it may."""

    wanted: ClassVar[list[dict[str, Any]]] = [
        {"temperature": 0.3},
        {"top_p": 0.9},
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"n": 0},
        {"top_logprobs": 3, "logprobs": True},
        {"tool_choice": "required", "tools": TOOLS},
        {"tools": TOOLS, "parallel_tool_calls": False},
        {"max_tokens": 0},
        {"seed": 2**63},
        {"stop": ""},
        {"stop": ["x", ""]},
        {"response_format": {"type": "json_object"}},
        {"messages": []},
        {"messages": [{"role": "user", "content": "a", "audio": {"id": "x"}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "description": 3}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    ]

    async def run(self, problem: Problem, base_url: str, api_key: str) -> float:
        for key in ("", "wrong", api_key[:-1]):
            async with AsyncOpenAI(base_url=base_url, api_key=key or "x", max_retries=0, timeout=600) as stranger:
                try:
                    await stranger.chat.completions.create(model="policy", messages=[{"role": "user", "content": "a"}])
                except AuthenticationError as error:
                    self.seen.setdefault(-1 - problem.index, []).append(error.status_code)
        return await super().run(problem, base_url, api_key)

    async def act(self) -> float:
        for options in self.wanted:
            try:
                await self.completions.create(**{"model": "policy", "messages": self.messages, **options})
            except BadRequestError as error:
                self.answers.append(error.body["message"] if isinstance(error.body, dict) else None)
        self.answers.append(await self.asked())
        return 1.0


class PostsAnything(Talks):
    """Bodies that are none, or not those of a chat."""

    bodies: ClassVar[list[bytes]] = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b'{"messages": 3}',
        b'{"messages": [3]}',
        b'{"messages": [{}]}',
        b'{"messages": [{"role": "user", "content": 3}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "stop": [3]}',
        b'{"messages": [{"role": "user", "content": "a"}], "n": 1e9}',
        b'{"messages": [{"role": "user", "content": "a"}], "seed": 99999999999999999999}',
        b'{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}',
        b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": 3}]}',
        b'{"messages": [{"role": "assistant", "tool_calls": [{}]}, {"role": "user", "content": "a"}]}',
        b'{"messages": [{"role": "assistant", "tool_calls": 3}, {"role": "user", "content": "a"}]}',
        b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": [], "arguments": {}}}]}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": ' + b"[" * 10**5 + b"]" * 10**5 + b"}]}",
    ]

    async def run(self, problem: Problem, base_url: str, api_key: str) -> float:
        statuses = []
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:
            for body in self.bodies:
                async with client.post(f"{base_url}/chat/completions", data=body) as answer:
                    statuses.append(answer.status)
        reward = await super().run(problem, base_url, api_key)
        self.seen[problem.index].append(statuses)
        return reward


class Full(Talks):
    """Never stops asking."""

    async def act(self) -> float:
        while True:
            text = await self.asked()
            self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]


class Insists(Talks):
    """Asks the same until it gets what it never gets."""

    async def act(self) -> float:
        while True:
            self.answers.append(await self.asked())
            self.seen[self.problem.index] = self.answers


class FullThenRaises(Full):
    """Has a bug of its own when there is no room."""

    async def act(self) -> float:
        try:
            return await super().act()
        except BadRequestError:
            pass
        raise KeyError("a bug of the agent")


class Limits(AtOnce):
    """Calls of one prompt that want different things."""

    wanted: ClassVar[list[dict[str, Any]]] = [{}, {"max_tokens": 9}, {"stop": ["x"]}, {"n": 2}]

    async def act(self) -> float:
        async def ask(i: int) -> list[str]:
            await asyncio.sleep(0.02 * self.order.index(i))
            answer = await self.completions.create(model="policy", messages=self.messages, **self.wanted[i])
            return [choice.message.content or "" for choice in answer.choices]

        self.answers += await asyncio.gather(*map(ask, range(4)))
        return 1.0


class Raises(Talks):
    async def act(self) -> float:
        await self.asked()
        raise ValueError("a bug of the agent")


class Hangs(Talks):
    async def act(self) -> float:
        await self.asked()
        await asyncio.sleep(1e6)
        return 1.0


class GivesUp(Talks):
    """Waits for no answer for longer than half a second, and asks again, as its client does by itself."""

    patience: ClassVar[dict[str, Any]] = {"max_retries": 20, "timeout": 0.5}

    async def streamed(self) -> str:
        return await self.asked()


class GivesUpAndHangs(Talks):
    patience: ClassVar[dict[str, Any]] = {"max_retries": 0, "timeout": 0.5}

    async def act(self) -> float:
        with contextlib.suppress(APITimeoutError):
            await self.asked()
        await asyncio.sleep(1e6)
        return 1.0


class HangsUp(Talks):
    """Hangs up when its call has reached an engine, and waits until the call has been ended there."""

    reached: ClassVar[threading.Event] = threading.Event()
    ended: ClassVar[threading.Event] = threading.Event()

    async def act(self) -> float:
        call = asyncio.ensure_future(self.asked())
        while not self.reached.is_set():
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait([call])
        while not self.ended.is_set():
            await asyncio.sleep(0.01)
        return 1.0


class Waits(Talks):
    """Makes no call, and never ends by itself."""

    runs: ClassVar[threading.Event] = threading.Event()

    async def act(self) -> float:
        self.runs.set()
        await asyncio.sleep(1e6)
        return 1.0


class Blocks(Talks):
    """Makes no call, and holds its thread until it may go on."""

    closed: ClassVar[list[int]] = []
    runs: ClassVar[threading.Event] = threading.Event()
    goes_on: ClassVar[threading.Event] = threading.Event()

    async def act(self) -> float:
        self.runs.set()
        self.goes_on.wait()
        return 1.0


class AsksNothing(Talks):
    async def act(self) -> float:
        return 1.0


class LeavesCalls(Talks):
    """Ends with a call open."""

    async def act(self) -> float:
        await self.asked()
        self.task = asyncio.ensure_future(self.asked())
        self.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # which nobody else looks at
        await asyncio.sleep(0.05)
        return 1.0


class Unmade(Talks):
    def __init__(self) -> None:
        raise ValueError("cannot be made")


class SaysMuch(Talks):
    async def act(self) -> float:
        return "1"  # type: ignore[return-value]
