"""A session: one agent's calls to the policy, as sequences to learn from. Token in, token out.

Invariants:
- sampled tokens stand in one sequence, and are learned from there alone;
- a call that repeats what was said goes on with those tokens; any other begins a branch, with all that came before as
  its prompt;
- a call that its client gave up leaves nothing to learn from: the next one goes on where it did;
- noise depends on the session's seed, the prompt, how often that was asked for with the same limits, and the position,
  not on timing, drafts or order; no turns share noise;
- a session ends by itself.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
from transformers import PreTrainedTokenizerBase

from specactor.data import chat
from specactor.data.stream import turn_seed
from specactor.errors import DataError
from specactor.rollout import resume
from specactor.rollout.endpoint import Body, ChatCall, Part, Refusal
from specactor.types import RolloutRequest, SamplingParams, Trajectory

TURN = "/"  # between the session's name and the turn's number
# Times `max_new_tokens` that a session may sample over all branches: an end to an agent that asks until it likes an
# answer.
MAX_SEQUENCES = 16
_HEEDED = ("role", "content", "tool_calls", "tool_call_id", "name")  # fields of a message
Tools = list[tuple[str, str]]  # names of called tools, and arguments in JSON
# splits a text into the rest and calls of tools
Parse = Callable[[str, Sequence[Mapping[str, Any]]], tuple[str, Tools]]
_Said = tuple[object, ...]  # a message as it is compared with others


class _Function(msgspec.Struct):
    """What SGLang's parsers take: another form is the caller's error, and must not be theirs."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class _Tool(msgspec.Struct):
    type: Literal["function"]
    function: _Function
    defer_loading: bool | None = None


@dataclass(kw_only=True)
class _Branch:
    so_far: Trajectory
    is_open: bool = True  # an engine generates its next turn
    last: _Turn | None = None  # that was heard


@dataclass(frozen=True, kw_only=True)
class _Turn:
    request: RolloutRequest
    call: ChatCall
    choice: int
    branch: _Branch
    so_far: Trajectory  # the branch before it
    room: int  # tokens that the response could have, whatever the call's own limit
    asked: tuple[tuple[int, ...], ...]
    repeat: int  # how often that was asked before
    said: tuple[int, ...]  # tokens between the branch so far and the response
    before: tuple[_Said, ...]
    tools: str


class Session:
    """One agent's calls, in one thread."""

    def __init__(self, request: RolloutRequest, tokenizer: PreTrainedTokenizerBase, *, max_prompt_tokens: int) -> None:
        """Take name, seed and sampling of `request`. Raises DataError without a chat template."""
        if tokenizer.chat_template is None:
            raise DataError("agents: the model's tokenizer has no chat template. Give one to the model's folder.")
        self._request, self._tokenizer, self._longest = request, tokenizer, max_prompt_tokens
        self._open: dict[str, _Turn] = {}
        self._branches: list[_Branch] = []
        # messages up to a response's end -> its branch, and the tokens until there
        self._places: dict[tuple[object, ...], tuple[_Branch, int]] = {}
        self._asked: Counter[tuple[tuple[int, ...], ...]] = Counter()
        self._num_turns = self._num_sampled = 0
        self.is_full = False  # a call was refused for want of room, or of tokens left to sample

    @property
    def turns(self) -> list[RolloutRequest]:
        return [turn.request for turn in self._open.values()]

    def is_open(self, request_id: str) -> bool:
        return request_id in self._open

    def ask(self, call: ChatCall) -> list[RolloutRequest]:
        """Return a call's turns; none if it is refused, or given up."""
        if call.is_given_up:
            self._undo(call)
            return []
        try:
            turns = self._turns_of(call)
        except Refusal as refusal:
            call.tell(refusal)
            return []
        except Exception as error:  # of what a client sent, as JSON that is nested too deep; others go on
            call.tell(Refusal(f"body: {type(error).__name__}: {error!s:.200}. Correct it."))
            return []
        self._open |= {turn.request.request_id: turn for turn in turns}
        return [turn.request for turn in turns]

    def hear(self, response: Trajectory, parse: Parse) -> None:
        if (turn := self._open.get(response.request_id)) is None:  # its call was given up
            self._num_sampled += len(response.token_ids)
            return
        text, tools = self._text(turn, response), Tools()
        if turn.tools:
            text, tools = parse(text, turn.call.body.tools or ())
            for number, mark in chat.special_tokens(self._tokenizer).items():
                if number in response.token_ids:  # a text that only looks like one stays
                    text = text.replace(mark, "")
        calls = [
            {"id": f"call_{turn.request.seed}_{i}", "type": "function", "function": {"name": name, "arguments": given}}
            for i, (name, given) in enumerate(tools)
        ]
        del self._open[response.request_id]
        own, own.last = turn.branch, turn
        own.so_far, own.is_open = resume.heard(resume.said(own.so_far, turn.said), response), False
        if response.finish_reason == "length" and len(response.token_ids) < turn.room:
            own.so_far = replace(own.so_far, finish_reason="stop")  # the call's own limit ended it
        self._num_sampled += len(response.token_ids)
        answer = _normal({"role": "assistant", "content": text, "tool_calls": calls})
        self._places.setdefault((turn.tools, *turn.before, _said(answer)), (own, len(own.so_far.token_ids)))
        self._tell(turn, response, text, calls)

    def _undo(self, call: ChatCall) -> None:
        """Forget a call, heard or not, and its noise."""
        turns = [turn for turn in self._open.values() if turn.call is call]
        for turn in turns:
            del self._open[turn.request.request_id]
            turn.branch.is_open = False
        for branch in self._branches:
            if (last := branch.last) is not None and last.call is call and not branch.is_open:
                branch.so_far = last.so_far
                turns.append(last)
        self._branches = [branch for branch in self._branches if branch.is_open or branch.so_far.token_ids]
        self._places = {k: (of, end) for k, (of, end) in self._places.items() if end <= len(of.so_far.token_ids)}
        for turn in turns:
            if self._asked[turn.asked] == turn.repeat + 1:
                self._asked[turn.asked] = turn.repeat
        self._num_sampled += 1  # so that a session that only hangs up ends, too

    def refuse_open(self) -> None:
        """End the session: nobody will answer its open calls."""
        for turn in self._open.values():
            turn.call.tell(Refusal("session: it is over.", "session_over", 410))
        self._open.clear()

    def whole(self) -> Trajectory:
        """Return the first sequence, with the others as its branches, in an order that no arrival moves. Where a call
        was refused for want of room it is cut."""
        found = [branch.so_far for branch in self._branches if branch.so_far.token_ids]
        found.sort(key=lambda t: (t.prompt_ids, t.seed, t.token_ids))
        if not found:
            return resume.nothing_of(replace(self._request, prompt_ids=()))
        first, *others = (replace(t, loss_mask=() if all(t.loss_mask) else t.loss_mask) for t in found)
        end = "length" if self.is_full else first.finish_reason
        return replace(first, request_id=self._request.request_id, finish_reason=end, branches=tuple(others))

    def _turns_of(self, call: ChatCall) -> list[_Turn]:
        body = call.body
        self._check(body)
        messages = [_normal(message) for message in body.messages]
        try:
            before = tuple(map(_said, messages))
            hash(before)
        except (KeyError, TypeError) as error:
            raise Refusal(f"messages: tool_calls: {error!r:.80}, expected names and arguments, texts both.") from error
        tools = json.dumps(body.tools) if body.tools and body.tool_choice != "none" else ""
        branch, prompt_ids, said = self._prompt(messages, before, tools, body)
        so_far = len(branch.so_far.token_ids) + len(said) if branch is not None else 0
        room = self._room(len(prompt_ids), so_far)
        sampling = self._sampling(body, room)
        asked = prompt_ids, _wanted(body)
        repeat = self._asked[asked]
        self._asked[asked] += 1
        turns = []
        for choice in range(body.n or 1):
            key = (choice, 0, repeat, *asked[1]) if body.seed is None else (choice, 1, body.seed, 0, 0, 0)
            request = replace(
                self._request,
                request_id=f"{self._request.request_id}{TURN}{self._num_turns}",
                prompt_ids=prompt_ids,
                seed=turn_seed(self._request.seed, prompt_ids, *key),
                sampling=sampling,
                num_earlier=len(prompt_ids) - len(branch.so_far.prompt_ids) if branch else 0,
            )
            self._num_turns += 1
            goes_on = branch is not None and choice == 0
            taken = branch if branch is not None and choice == 0 else _Branch(so_far=resume.nothing_of(request))
            taken.is_open = True
            self._branches += [] if goes_on else [taken]
            turns.append(
                _Turn(
                    request=request,
                    call=call,
                    choice=choice,
                    branch=taken,
                    so_far=taken.so_far,
                    room=room,
                    asked=asked,
                    repeat=repeat,
                    said=said if goes_on else (),
                    before=before,
                    tools=tools,
                )
            )
        return turns

    def _room(self, num_prompt: int, so_far: int) -> int:
        """Return how many tokens a response may have. Raises Refusal for none."""
        own = self._request.sampling
        if self._num_sampled >= MAX_SEQUENCES * own.max_new_tokens:
            self.is_full = True
            raise Refusal(
                f"session: it is over: {self._num_sampled} tokens are sampled, expected less than "
                f"{MAX_SEQUENCES} * rollout.max_new_tokens = {MAX_SEQUENCES * own.max_new_tokens}. Return a reward.",
                "session_over",
                410,
            )
        room = min(self._longest + own.max_new_tokens - num_prompt, own.max_new_tokens - so_far)
        if room < 1:
            self.is_full = True
            raise Refusal(
                f"messages: {num_prompt} tokens leave no room: a conversation may have "
                f"rollout.max_new_tokens = {own.max_new_tokens} after its prompt. Say less, or end the session.",
                "context_length_exceeded",
            )
        return room

    def _sampling(self, body: Body, room: int) -> SamplingParams:
        own = self._request.sampling
        asked = [x for x in (body.max_completion_tokens, body.max_tokens, room) if x is not None]
        stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        return replace(own, max_new_tokens=min(asked), stop=own.stop + stop)

    def _prompt(
        self, messages: Sequence[dict[str, Any]], before: tuple[_Said, ...], tools: str, body: Body
    ) -> tuple[_Branch | None, tuple[int, ...], tuple[int, ...]]:
        """Return the branch that goes on, all tokens before the response, and the new ones."""
        try:
            for k in range(len(messages) - 1, 0, -1):
                if (place := self._places.get((tools, *before[:k]))) is not None:
                    branch, end = place
                    ids = branch.so_far.token_ids[:end]
                    said = chat.observation_ids(self._tokenizer, messages[k:], last_token=ids[-1])
                    goes_on = end == len(branch.so_far.token_ids) and not branch.is_open
                    return branch if goes_on else None, (*branch.so_far.prompt_ids, *ids, *said), said
            prompt_ids = chat.prompt_ids(self._tokenizer, messages, tools=body.tools if tools else None)
        except DataError as error:
            raise Refusal(str(error)) from error
        return None, prompt_ids, ()

    def _check(self, body: Body) -> None:
        own = self._request.sampling
        ours = {"temperature": own.temperature, "top_p": own.top_p}
        others = [(name, getattr(body, name), value) for name, value in ours.items()] if own.temperature else []
        penalties = [(name, getattr(body, name)) for name in ("presence_penalty", "frequency_penalty")]
        limits = [x for x in (body.max_tokens, body.max_completion_tokens) if x is not None]
        for name, value, ok, expected in (
            *((name, v, v is None or v == ours, f"{ours} as in the run, or nothing") for name, v, ours in others),
            *((name, value, not value, "0: engines have no penalties") for name, value in penalties),
            ("messages", [], len(body.messages) > 0, "at least one"),
            ("n", body.n, body.n is None or 1 <= body.n <= 128, "1 to 128"),
            ("max_tokens", limits, min(limits, default=1) >= 1, "at least 1"),
            ("seed", body.seed, abs(body.seed or 0) < 2**63, "64 bits"),
            ("top_logprobs", body.top_logprobs, not body.top_logprobs, "0: engines give those of sampled tokens"),
            ("tool_choice", body.tool_choice, body.tool_choice in (None, "auto", "none"), "auto or none"),
            ("parallel_tool_calls", body.parallel_tool_calls, body.parallel_tool_calls is not False, "true"),
            ("tools", body.tools, all(map(_is_tool, body.tools or ())), "functions, their names texts, none strict"),
            ("stop", body.stop, body.stop != "" and all(body.stop or ()), "texts that are not empty"),
        ):
            if not ok:
                raise Refusal(f"{name}: got {value!r:.80}, expected {expected}. What is sampled is trained on.")

    def _text(self, turn: _Turn, response: Trajectory) -> str:
        """Return what was said; with tools it keeps special tokens, which mark calls in some models' formats."""
        ids = list(response.token_ids)
        if response.finish_reason == "stop" and ids and ids[-1] in chat.special_tokens(self._tokenizer):
            ids.pop()  # the turn's end, which no parser of SGLang's gets to see
        text = str(self._tokenizer.decode(ids, skip_special_tokens=not turn.tools))
        ends = [end for stop in turn.request.sampling.stop if (end := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def _tell(self, turn: _Turn, response: Trajectory, text: str, calls: Sequence[Mapping[str, Any]]) -> None:
        delta: dict[str, Any] = {"content": text} if text or not calls else {}
        if calls:
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        told: list[tuple[str, float]] = []
        if turn.call.body.logprobs:
            pairs = zip(response.token_ids, response.logprobs, strict=True)
            told = [(str(self._tokenizer.decode([token])), logprob) for token, logprob in pairs]
        turn.call.tell(
            Part(
                choice=turn.choice,
                delta=delta,
                tokens=told,
                finish_reason="tool_calls" if calls else response.finish_reason,
                num_prompt=len(turn.request.prompt_ids),
                num_completion=len(response.token_ids),
            )
        )


def _normal(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a text. Raises Refusal."""
    content = message.get("content") or ""
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Refusal("messages: a content that is no text, expected texts alone.")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str) or not isinstance(message.get("role"), str):
        raise Refusal(f"messages: got {message!r:.80}, expected a role and a content, both texts.")
    if others := [key for key, value in message.items() if key not in _HEEDED and value]:
        raise Refusal(f"messages: {others[0]:.80}: nothing heeds it, expected {', '.join(_HEEDED)}. Leave it out.")
    kept = {key: message[key] for key in _HEEDED[2:] if message.get(key)}
    return {"role": message["role"], "content": content, **kept}


def _wanted(body: Body) -> tuple[int, int, int]:
    """Return numbers that tell apart calls of one prompt."""
    limits = [x for x in (body.max_completion_tokens, body.max_tokens) if x is not None]
    return body.n or 1, min(limits, default=0), zlib.crc32(json.dumps(body.stop).encode()) if body.stop else 0


def _is_tool(tool: Mapping[str, Any]) -> bool:
    try:
        return not msgspec.convert(tool, type=_Tool).function.strict
    except msgspec.ValidationError:
        return False


def _said(message: Mapping[str, Any]) -> _Said:
    """Return what equal messages have in common."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return (message["role"], message["content"], message.get("tool_call_id"), *calls)
