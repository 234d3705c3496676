"""Where a response ends: at the token where plain decoding ends it.

SGLang looks for a stop string in the text of the last few tokens: as many as the string has, and one more. After a
round that emits several tokens it looks at that many more, and at the string before the end of sequence. So it can find
strings that plain decoding does not find (spelled with more tokens than usual), and miss an end before them. Here a
round's tokens are looked at one after the other. A string may also begin in what the request brought along of its
response (`beginnings`).

A request that is asked to end (`Engine.abort_requests`) ends after its next round, and SGLang does not look whether a
token of that round is its last anyway. Here it does: an aborted response has no token after its end, and can be gone on
with.

Engines start without a tokenizer, and read it when the first request with a stop string comes. It only turns tokens to
text: what ends a sequence is still the model's own configuration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specactor.data.tokenizer import load_tokenizer
from specactor.errors import ConfigError, EngineError
from specactor.rollout.sglang import partial_response

_NEEDED = "rollout.stop: needs a tokenizer in the model's folder."


def install() -> None:
    """Registers the hook with SGLang's plugin registry. Call it from a plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
    HookRegistry.register(target, finish, HookType.AROUND)


class Text:
    """The part of a tokenizer that SGLang needs to look for stop strings."""

    eos_token_id = None
    additional_stop_token_ids = None

    def __init__(self, folder: str) -> None:
        """Raises EngineError when the folder has no tokenizer."""
        if not any(Path(folder).glob("tokenizer*")):  # transformers makes an empty one
            raise EngineError(f"{_NEEDED} {folder} has no file tokenizer*.")
        try:
            self._tokenizer = load_tokenizer(Path(folder))
        except ConfigError as error:
            raise EngineError(f"{_NEEDED} {error}") from error

    def encode(self, text: str, **_: object) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens))
        return text


@functools.lru_cache(maxsize=1)
def _text() -> Text:
    from sglang.srt.runtime_context import get_model, get_serving

    return Text(get_serving().tokenizer_path or get_model().model_path)


def finish(original: Callable[..., None], req: Any, new_tokens: int = 1) -> None:
    """Whether and where the request ends, now that the last `new_tokens` of its output are there."""
    asked = req.to_finish
    wanted = asked is not None and getattr(asked, "status_code", None) is None  # and not an error
    if not wanted or new_tokens < 1:
        finish_token_by_token(original, req, new_tokens)
        return
    req.to_finish = None
    finish_token_by_token(original, req, new_tokens)
    if not req.finished():
        req.to_finish = asked
        original(req, new_tokens)


def finish_token_by_token(original: Callable[..., None], req: Any, new_tokens: int = 1) -> None:
    """`finish`, for requests that go on."""
    if not req.sampling_params.stop_strs:
        original(req, new_tokens)
        return
    if req.tokenizer is None:
        req.tokenizer = _text()
    if req.finished():
        return
    emitted, before = req.output_ids, partial_response.of(req)
    req.sampling_params.max_new_tokens += len(before)
    try:
        for length in range(len(emitted) - new_tokens + 1, len(emitted) + 1):
            req.output_ids = before + emitted[:length]
            original(req, 1)
            if req.finished():
                break
    finally:
        req.output_ids = emitted
        req.sampling_params.max_new_tokens -= len(before)
        if req.finished_len is not None:
            req.finished_len -= len(before)
