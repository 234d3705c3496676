"""A response ends where plain decoding ends it, and tells which experts computed its tokens.

What a request brings along of its conversation is prompt to SGLang; its length travels with the sampling parameters. A
round's tokens with a stop string are looked at one by one: given several, SGLang finds it elsewhere. Experts are noted
by slot, which accepted rows and cached prefixes keep.
"""

from __future__ import annotations

import base64
import functools
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specactor.data.tokenizer import joins_tokens, load_tokenizer
from specactor.errors import ConfigError, EngineError
from specactor.rollout.resume import num_begun
from specactor.types import RolloutRequest

_NUMBER, _EARLIER, _UNDRAFTED = "specactor_begun", "specactor_earlier", "specactor_undrafted"
_NEEDED = "rollout.stop: needs a tokenizer in the model's folder."


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
    HookRegistry.register(target, finish, HookType.AROUND)
    target = "sglang.srt.state_capturer.routed_experts.RoutedExpertsCapturer.__init__"
    HookRegistry.register(target, _make_room, HookType.AROUND)
    target = "sglang.srt.state_capturer.base.BaseTopkCapturer.on_forward_end"
    HookRegistry.register(target, copy_with_tokens, HookType.AROUND)


def custom_params(request: RolloutRequest) -> dict[str, int] | None:
    """Return SGLang's ``custom_params``, which reach the scheduler as they are."""
    counts = {_NUMBER: num_begun(request), _EARLIER: request.num_earlier}
    params = {name: count for name, count in counts.items() if count}
    return params | ({} if request.is_drafted else {_UNDRAFTED: 1}) or None


def is_drafted(req: Any) -> bool:
    """Return whether drafters may draft for SGLang's request `req`."""
    return _UNDRAFTED not in (req.sampling_params.custom_params or {})


def ends_of(req: Any) -> frozenset[int] | None:
    """Return the tokens that end it, whatever its length; None where it may end in other ways, too."""
    sampling = req.sampling_params
    if sampling.stop_strs or sampling.stop_regex_strs or req.grammar is not None or req.tokenizer is not None:
        return None
    return frozenset(() if sampling.ignore_eos else (*(sampling.stop_token_ids or ()), *(req.eos_token_ids or ())))


def begun_of(req: Any) -> array[int]:
    """Return what SGLang's request brought along of its response."""
    return _last(req, _NUMBER)


def conversation_of(req: Any) -> array[int]:
    """Return earlier turns, and what the request brought along of its response."""
    return _last(req, _EARLIER, _NUMBER)


def _last(req: Any, *numbers: str) -> array[int]:
    count = sum((req.sampling_params.custom_params or {}).get(number, 0) for number in numbers)
    return array("q", req.origin_input_ids[len(req.origin_input_ids) - count :])


class Text:
    """What SGLang needs of a tokenizer to find stop strings."""

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

    def keeps(self, parts: Sequence[str]) -> bool:
        """Return whether a part that is in the text of some tokens is in that of any more around them."""
        # Half a character is U+FFFD until the other half comes.
        return joins_tokens(self._tokenizer) and not any("\ufffd" in part for part in parts)

    def encode(self, text: str, **_: object) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens))
        return text


@functools.lru_cache(maxsize=1)
def _text() -> Text:  # read when the first request with a stop string comes
    from sglang.srt.runtime_context import get_model, get_serving

    return Text(get_serving().tokenizer_path or get_model().model_path)


def finish(original: Callable[..., None], req: Any, new_tokens: int = 1) -> None:
    """Find whether and where the request ends, given its last `new_tokens`."""
    asked = req.to_finish
    # SGLang would not look whether a token of an aborted request's last round ends it. A response that can be gone on
    # with has no token after its end.
    waits = asked is not None and getattr(asked, "status_code", None) is None and new_tokens > 0  # and not an error
    if waits:
        req.to_finish = None
    finish_token_by_token(original, req, new_tokens)
    if waits and not req.finished():
        req.to_finish = asked
        original(req, new_tokens)


def finish_token_by_token(original: Callable[..., None], req: Any, new_tokens: int) -> None:
    if not req.sampling_params.stop_strs:
        original(req, new_tokens)
        return
    if req.tokenizer is None:
        req.tokenizer = _text()
    if req.finished():
        return
    emitted, before = req.output_ids, begun_of(req)  # a stop string may begin in what was brought along
    req.sampling_params.max_new_tokens += len(before)
    # The last tokens that are looked at: a token has a byte or more. SGLang takes the tokens of the usual encoding, but
    # policies spell a text in others, too.
    req.sampling_params.stop_str_max_len = max(len(stop.encode()) for stop in req.sampling_params.stop_strs)
    try:
        # Few rounds end a response, and one look shows whether this one does.
        if new_tokens > 1 and not req.to_finish and req.tokenizer.keeps(req.sampling_params.stop_strs):
            req.output_ids = before + emitted
            original(req, new_tokens)
            if not req.finished():
                return
            req.finished_reason = req.finished_len = None
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


def _make_room(original: Callable[..., None], capturer: Any, *arguments: Any, **named: Any) -> None:
    from sglang.srt.runtime_context import get_spec

    # SGLang reserves one row per running request, or per token of a prefill; a round of drafts can have more.
    rows = get_spec().speculative_num_draft_tokens or 1
    original(capturer, *arguments, **named | {"max_running_requests": rows * named["max_running_requests"]})


def copy_with_tokens(original: Callable[..., Any], capturer: Any, *arguments: Any, **named: Any) -> Any:
    """Give the experts of a pass to those who copy its tokens to the host."""
    from sglang.srt.runtime_context import get_spec

    # SGLang would wait for the device, before it samples: engines that speculate do without its own overlap. But their
    # rounds are copied by SGLang, and plain ones by `overlap`.
    named["no_copy_to_cpu"] |= get_spec().speculative_num_draft_tokens is not None
    return original(capturer, *arguments, **named)


def experts_of(meta_info: dict[str, Any], *, num_tokens: int, start: int, goes_on: bool) -> bytes:
    """Return int16 [rows, layers, experts per token] of all tokens but the last; of a response that `goes_on`, of those
    that produced its new tokens. `start` is the first row's position. Raises EngineError when rows are missing."""
    encoded = meta_info.get("routed_experts")
    if encoded is None or num_tokens == 0:
        return b""
    found = base64.b64decode(encoded)
    num_rows = meta_info["prompt_tokens"] + num_tokens - 1 - start
    if not found or len(found) % num_rows:
        raise EngineError(f"SGLang returned {len(found)} bytes of routed experts, expected {num_rows} rows")
    rows = np.frombuffer(found, dtype="<i4").reshape(num_rows, -1)
    return (rows[-num_tokens:] if goes_on else rows).astype("<i2").tobytes()
