"""Messages as tokens, by a model's chat template. What was sampled is never rendered again.

Invariants: between responses stand the template's own tokens; an environment's text cannot become a special token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from transformers import PreTrainedTokenizerBase

from specactor.errors import DataError

Message = Mapping[str, Any]  # ``role`` and ``content``, and what else the template knows

_ANSWER, _MARK = "specactoranswer", "specactorcontent{}end"
"""Stand for texts while a template is rendered; letters and digits, which no template changes."""


def prompt_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Sequence[Message] | None = None
) -> str:
    """Render up to where the response begins. Raises DataError for what the template refuses."""
    if tokenizer.chat_template is None:
        raise DataError("messages: the model's tokenizer has no chat template. Give texts, or a model that has one.")
    wanted: dict[str, Any] = {"tools": tools, "tokenize": False, "add_generation_prompt": True}
    read = [_with_objects(message) for message in messages]
    try:
        try:
            text = tokenizer.apply_chat_template(read, **wanted)
        except TypeError:  # DeepSeek's templates join arguments, as JSON, with texts
            text = tokenizer.apply_chat_template([dict(m) for m in messages], **wanted)
    except Exception as error:  # a template raises what it likes
        raise DataError(
            f"messages: the model's chat template refuses them: {type(error).__name__}: {error}. Correct the messages."
        ) from error
    return str(text)


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, said: str | Sequence[Message], *, tools: Sequence[Message] | None = None
) -> tuple[int, ...]:
    """Return the tokens of what a policy sees first."""
    if isinstance(said, str):
        _check_unicode(said)
        return tuple(text_ids(tokenizer, [said])[0])
    special = [*special_tokens(tokenizer).values(), _MARK.partition("{")[0]]
    # Others stay where they are: a template may look at them, and the tokens are then those of the whole text.
    forging = [i for i, message in enumerate(said) if any(text in str(message.get("content")) for text in special)]
    text = prompt_text(tokenizer, [_marked(m, i) if i in forging else m for i, m in enumerate(said)], tools)
    return tuple(_with_contents(tokenizer, text, said))


def text_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Sequence[int]]:
    """Return the tokens of texts with what the tokenizer adds; a text that begins with that, as one of a template may,
    gets no second."""
    added = tokenizer("")["input_ids"]  # before a text, and behind it
    sizes = range(1, len(added) + 1)
    found = tokenizer(list(texts))["input_ids"]
    return [ids[next((n for n in sizes if ids[:n] == ids[n : 2 * n] == added[:n]), 0) :] for ids in found]


def rendered_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Return the tokens of a template's text, which has all its marks."""
    return _tokens(tokenizer, text, is_template=True)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def are_messages(value: object) -> TypeGuard[Sequence[Message]]:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and len(value) > 0
        and all(isinstance(m, Mapping) and {type(m.get("role")), type(m.get("content"))} == {str} for m in value)
    )


def observation_ids(
    tokenizer: PreTrainedTokenizerBase, said: str | Sequence[Message], *, last_token: int | None
) -> tuple[int, ...]:
    """Return the tokens between a response and the next; if `last_token` is the template's own end, it is not
    repeated."""
    if isinstance(said, str):
        return _tokens(tokenizer, said, is_template=False)
    marked = [_marked(message, i) for i, message in enumerate(said)]
    before: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
    _, found, after = prompt_text(tokenizer, [*before, *marked]).rpartition(_ANSWER)
    if not found:
        raise DataError("chat template: it leaves out what the assistant said. Let environments say texts instead.")
    ids = _with_contents(tokenizer, after, said)
    return tuple(ids[1:] if ids and ids[0] == last_token else ids)


def _with_objects(message: Message) -> dict[str, Any]:
    """Return a message with the arguments of called tools as objects, for which templates are written; OpenAI's
    clients send them as JSON."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [*map(_with_object, calls)]} if isinstance(calls, list) else dict(message)


def _with_object(call: object) -> object:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        return call
    if not isinstance(told := function.get("arguments"), str):
        return call
    try:
        found = json.loads(told)
    except (ValueError, RecursionError):
        return call  # as a policy may have written them
    return {**call, "function": {**function, "arguments": found}} if isinstance(found, dict) else call


def _marked(message: Message, number: int) -> Message:
    return {**message, "content": _MARK.format(number)}


def _with_contents(tokenizer: PreTrainedTokenizerBase, text: str, said: Sequence[Message]) -> list[int]:
    """Return the tokens of a template's text, and, in place of marks, of what was said."""
    ids: list[int] = []
    for i, part in enumerate(re.split(_MARK.format(r"(\d+)"), text)):
        own = str(said[int(part)]["content"]) if i % 2 else part
        ids += _tokens(tokenizer, own, is_template=not i % 2)
    return ids


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str, *, is_template: bool) -> tuple[int, ...]:
    _check_unicode(text)
    return tuple(tokenizer(text, add_special_tokens=False, split_special_tokens=not is_template)["input_ids"])


def _check_unicode(text: str) -> None:
    try:
        text.encode()  # tokenizers say no more than that the type is wrong
    except UnicodeEncodeError as error:
        raise DataError(f"text: {error}. Leave such halves of characters out.") from error
