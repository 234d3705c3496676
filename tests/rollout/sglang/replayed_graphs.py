"""SGLang's own runner of decode graphs in an engine without a device: buffers, padding and attention's metadata are as
on a GPU, and where a GPU replays a graph, the code that was captured runs again on the same buffers.

Engines load this module by its drafter; its rank calls are `graphs.capture` and `graphs.drop`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.model_executor import graph_shared_output
from sglang.srt.model_executor.runner import base_cuda_graph_runner as base
from sglang.srt.model_executor.runner import decode_cuda_graph_runner as module
from sglang.srt.model_executor.runner_backend.base_cuda_graph_backend import BaseCudaGraphBackend

from specactor.rollout.sglang.rank_calls import RANK_CALLS
from tests.rollout.sglang.drafters import HalfRight

SIZES = [1, 2, 4, 8, 16, 32, 64, 96, 10_000]
"""Of graphs, in rows; SGLang leaves out those that are too large."""


_texts: dict[tuple[tuple[int, ...], int], list[int]] = {}


class Half(HalfRight):
    """Keeps what it knows when it is made anew."""

    name = "half"

    def __init__(self) -> None:
        self._texts = _texts


class RunAgain(BaseCudaGraphBackend):  # type: ignore[misc]
    """Instead of CUDA graphs."""

    def __init__(self) -> None:
        self.captured: dict[Any, Callable[[], Any]] = {}
        self.replayed: dict[int, int] = {}
        """Replays by the size of the graph."""

    @contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        yield

    def capture_one(
        self, shape_key: Any, forward_fn: Callable[[], Any], capture_inputs: Any = None, post_warmup_hook: Any = None
    ) -> None:
        forward_fn()
        self.captured[shape_key] = forward_fn

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self.captured

    @contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def replay(self, shape_key: Any, static_forward_batch: Any, **_: Any) -> Any:
        self.replayed[shape_key.size] = self.replayed.get(shape_key.size, 0) + 1
        return self.captured[shape_key]()

    def cleanup(self) -> None:
        self.captured.clear()


def _runner(context: Any, payload: bytes) -> Any:
    if b"draft" in payload:
        return context.draft_worker._draft_worker.model_runner
    return context._scheduler.tp_worker.model_runner


def capture(context: Any, payload: bytes) -> bytes:
    """Capture graphs for the target or, with `draft`, the draft model; with the class that the engine would take.
    `stale`: a wrong version, in which attention is never told of another batch. Answers the sizes, and how many tokens
    of a request each row has."""
    runner = _runner(context, payload)
    kind, attention = runner._decode_cuda_graph_runner_cls(), runner.attn_backend

    def tell(batch: Any, in_capture: bool = False) -> None:
        if in_capture or b"stale" not in payload:
            attention.init_forward_metadata(batch)  # it has no buffers of its own; it gets views of the graph's

    attention.init_cuda_graph_state = lambda *_: None
    attention.get_cuda_graph_seq_len_fill_value = lambda: 1
    attention.init_forward_metadata_out_graph = tell
    config = SimpleNamespace(decode=SimpleNamespace(bs=SIZES, backend="full"))
    real = base.get_exec()
    execution = SimpleNamespace(
        graph=_Beside(real.graph, cuda_graph_config=config), overlap=real.overlap, features=real.features
    )
    torch.cpu.is_current_stream_capturing = lambda: False  # type: ignore[attr-defined]
    with (
        patch.object(module, "resolve_decode_backend", lambda _: RunAgain()),
        patch.object(module, "graph_capture", lambda stream: nullcontext(SimpleNamespace(stream=stream))),
        patch.object(module, "get_or_create_global_graph_capture_stream", lambda: None),
        patch.object(base, "get_exec", lambda: execution),
    ):
        runner.graph_shared_output = graph_shared_output.GraphSharedOutput(
            device=runner.device, max_rows=runner.max_shared_logits_buffer_rows()
        )
        runner.decode_cuda_graph_runner = kind(runner)
    graphs = runner.decode_cuda_graph_runner
    return json.dumps([graphs.capture_bs, graphs.captured_req_width]).encode()


class _Beside:
    """An object with other values for some of its attributes."""

    def __init__(self, other: Any, **values: Any) -> None:
        self._other = other
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


def drop(context: Any, payload: bytes) -> bytes:
    """No graphs any more. Answers how often each was replayed, by its size."""
    runner = _runner(context, payload)
    graphs, runner.decode_cuda_graph_runner = runner.decode_cuda_graph_runner, None
    vars(torch.cpu).pop("is_current_stream_capturing", None)
    return json.dumps(graphs.backend.replayed if graphs is not None else {}).encode()


RANK_CALLS.update({"graphs.capture": capture, "graphs.drop": drop})
