"""Where a response with stop strings ends: at the token where plain decoding ends it.

SGLang looks for a stop string in the text of the last few tokens: as many as the string has, and one more. After a
round that emits several tokens it looks at that many more, and at the string before the end of sequence. So it can find
strings that plain decoding does not find (spelled with more tokens than usual), and miss an end before them. Here a
round's tokens are looked at one after the other.

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

_NEEDED = "rollout.stop: needs a tokenizer in the model's folder, or use rollout.stop_token_ids."


def install() -> None:
    """Registers the hook with SGLang's plugin registry. Call it from a plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
    HookRegistry.register(target, finish_token_by_token, HookType.AROUND)


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


def finish_token_by_token(original: Callable[..., None], req: Any, new_tokens: int = 1) -> None:
    """Whether and where the request ends, now that the last `new_tokens` of its output are there."""
    if not req.sampling_params.stop_strs:
        original(req, new_tokens)
        return
    if req.tokenizer is None:
        req.tokenizer = _text()
    emitted = req.output_ids
    try:
        for length in range(len(emitted) - new_tokens + 1, len(emitted) + 1):
            req.output_ids = emitted[:length]
            original(req, 1)
            if req.finished():
                break
    finally:
        req.output_ids = emitted
