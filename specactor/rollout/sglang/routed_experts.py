"""Which experts computed each token of a prompt and its response, for routing replay.

SGLang notes them by slot of the KV pool, and a request keeps the slots of accepted rows. A cached prefix has those of
the pass that computed it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np

from specactor.errors import EngineError


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.state_capturer.routed_experts.RoutedExpertsCapturer.__init__"
    HookRegistry.register(target, _make_room, HookType.AROUND)


def _make_room(original: Callable[..., None], capturer: Any, *arguments: Any, **named: Any) -> None:
    from sglang.srt.runtime_context import get_spec

    # SGLang reserves one row per running request, or per token of a prefill; a round of drafts can have more.
    rows = get_spec().speculative_num_draft_tokens or 1
    original(capturer, *arguments, **named | {"max_running_requests": rows * named["max_running_requests"]})


def of_response(meta_info: dict[str, Any], *, num_tokens: int, start: int, goes_on: bool) -> bytes:
    """Return int16 [rows, layers, experts per token] of all tokens but the last; of a response that `goes_on`, of those
    that produced its `num_tokens` new tokens.

    Raises EngineError when rows are missing. Args: start: position of the first row in `meta_info`.
    """
    encoded = meta_info.get("routed_experts")
    if encoded is None or num_tokens == 0:
        return b""
    found = base64.b64decode(encoded)
    num_rows = meta_info["prompt_tokens"] + num_tokens - 1 - start
    if not found or len(found) % num_rows:
        raise EngineError(f"SGLang returned {len(found)} bytes of routed experts, expected {num_rows} rows")
    rows = np.frombuffer(found, dtype="<i4").reshape(num_rows, -1)
    return (rows[-num_tokens:] if goes_on else rows).astype("<i2").tobytes()
