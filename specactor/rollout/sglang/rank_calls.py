"""Functions that the trainer calls by name in every rank of an engine, and all that they need of SGLang's scheduler."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from specactor.config.speculation import MTP
from specactor.errors import EngineError
from specactor.parallel.devices import trim_heap
from specactor.rollout.sglang.head_runner import PolicyWithMtp
from specactor.weights_sync.receiver import EngineRank

METHOD = "specactor_call"  # name under which SGLang finds `_run` on its scheduler
PAYLOAD_FILE = "payload"


Reply = tuple[bytes, str]
"""One rank's answer, and what it failed with, of which one is empty."""


class RankContext(EngineRank):
    """What a rank call may use."""

    def __init__(self, scheduler: Any) -> None:
        from sglang.srt.runtime_context import get_parallel

        self._scheduler = scheduler
        self.tp_rank: int = get_parallel().tp_rank
        self.tp_size: int = get_parallel().tp_size
        self.model: torch.nn.Module = scheduler.tp_worker.model_runner.model
        self.draft_worker: Any = scheduler.draft_worker
        runners = getattr(self.draft_worker, "draft_runners", {})  # SGLang's own algorithms have none of these
        if (mtp := runners.get(MTP)) is not None:
            self.model = PolicyWithMtp(self.model, mtp.model)
        self.tool_call_parser: str | None = scheduler.server_args.tool_call_parser

    def flush_cache(self) -> None:
        """Do as `flushed` after an update of weights, and tell drafters, or raise EngineError."""
        if not self.flushed():
            raise EngineError("flush_cache: requests are still running. Abort them or wait for them first.")
        if hasattr(self.draft_worker, "policy_changed"):  # SGLang's own algorithms' have it not
            self.draft_worker.policy_changed()

    def flushed(self) -> bool:
        """Forget all keys and values, or return False while requests run."""
        trim_heap()
        # torch's giving memory back collects all garbage: 0.4 s
        return bool(self._scheduler.flush_cache(empty_cache=False))

    def begin_weight_update(self) -> None:
        """Collective: bring parameters into the layout of checkpoints."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        self._check(self._scheduler.weight_updater.begin_weight_update(BeginWeightUpdateReqInput(selector="target")))

    def end_weight_update(self) -> None:
        """Bring parameters back into the layout that computes."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        self._check(self._scheduler.weight_updater.end_weight_update(EndWeightUpdateReqInput()))

    @staticmethod
    def _check(result: Any) -> None:
        if not result.success:
            raise EngineError(f"SGLang refused the weight update: {result.message}")


def _identify(context: RankContext, payload: bytes) -> bytes:
    """Prove that the plugin is at work in this rank."""
    return msgspec.json.encode({"tp_rank": context.tp_rank, "tp_size": context.tp_size, "echo": payload.decode()})


def _flush(context: RankContext, payload: bytes) -> bytes:
    return b"flushed" if context.flushed() else b""


def _parse_tools(context: RankContext, payload: bytes) -> bytes:
    """Split a response by the engine's parser; the unreadable is text."""
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    text, tools = msgspec.json.decode(payload)
    parser = FunctionCallParser([Tool(**tool) for tool in tools], context.tool_call_parser or "qwen25")
    try:
        rest, calls = parser.parse_non_stream(text)
        # A lone surrogate is no character; behind a backslash JSON means the same.
        found = [(call.name, call.parameters.encode(errors="backslashreplace").decode()) for call in calls]
        return msgspec.json.encode((rest, found))
    except Exception:  # parsers fail in many ways on JSON that is no call, and policies write whatever they like
        return msgspec.json.encode((text, []))


RankFunction = Callable[[RankContext, bytes], bytes]
RANK_CALLS: dict[str, RankFunction] = {"identify": _identify, "flush": _flush, "parse_tools": _parse_tools}


def find(name: str) -> RankFunction:
    """Return the function of a registered name, or of ``module:function``. Raises EngineError."""
    if name in RANK_CALLS:
        return RANK_CALLS[name]
    module, _, function = name.partition(":")
    if function:
        found: RankFunction = getattr(importlib.import_module(module), function)
        return found
    raise EngineError(
        f"rank call {name!r} is not registered, expected one of {sorted(RANK_CALLS)} or 'module:function'. "
        "Add it to specactor/rollout/sglang/rank_calls.py."
    )


def reply_file(folder: Path, tp_rank: int) -> Path:
    return folder / f"reply-{tp_rank}"


def read_replies(folder: Path, tp_size: int) -> list[bytes]:
    """Return every rank's answer. Raises EngineError that names failed ranks."""
    replies: list[Reply] = []
    for rank in range(tp_size):
        file = reply_file(folder, rank)
        if not file.exists():
            raise EngineError(f"rank {rank} did not answer: the plugin of specactor is not active in it")
        replies.append(msgspec.msgpack.decode(file.read_bytes(), type=Reply))
    errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(replies) if error]
    if errors:
        raise EngineError("; ".join(errors))
    return [value for value, _ in replies]


def _run(scheduler: Any, name: str, folder: str) -> None:
    # SGLang runs it on all ranks between two steps, and reports rank 0's error alone: so every rank writes a file.
    context = RankContext(scheduler)
    try:
        payload = (Path(folder) / PAYLOAD_FILE).read_bytes()
        with torch.no_grad():
            reply: Reply = find(name)(context, payload), ""
    except Exception as error:  # the boundary of the process: whatever a call raises must reach the caller
        traceback.print_exc()
        reply = b"", f"{type(error).__name__}: {error}"
    reply_file(Path(folder), context.tp_rank).write_bytes(msgspec.msgpack.encode(reply))


def install() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    setattr(Scheduler, METHOD, lambda self, name, folder: _run(self, name, folder))
