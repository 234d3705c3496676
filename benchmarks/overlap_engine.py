"""A pretended device in an engine's process: a pass takes its time beside the host, and computes nothing.

A token is a hash of the request's seed, its position and the token before, so that one read too early or late changes
all that follow. A copy to the host holds POISON until its event is waited for, which is over when the passes before it
are.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput

from benchmarks.overlap import SET
from specactor.rollout.sglang.rank_calls import RANK_CALLS
from specactor.rollout.speculation.drafter import Drafter, DraftSequence

FIRST_TOKEN, VOCAB = 4, 24
"""Tokens that end nothing."""
POISON = 2


class Nobody(Drafter):
    """Drafts nothing, and brings this module into the engine."""

    name = "nobody"

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return [[] for _ in sequences]


class _Device:
    pass_s = 0.0
    free_s = 0.0
    """When all that was launched is over."""


class _Event:
    """As much of one as the scheduler uses."""

    def __init__(self) -> None:
        self._due_s = 0.0
        self.copy: tuple[torch.Tensor, torch.Tensor] | None = None
        """(target, what it will hold)"""

    def record(self, *_: Any) -> None:
        self._due_s = _Device.free_s

    def synchronize(self) -> None:
        time.sleep(max(0.0, self._due_s - time.perf_counter()))
        if self.copy is not None:
            self.copy[0].copy_(self.copy[1])


def _copy_to_cpu(result: Any, **_: Any) -> None:
    on_device, result.next_token_ids = result.next_token_ids, torch.full_like(result.next_token_ids, POISON)
    result.copy_done.copy = result.next_token_ids, on_device
    result.copy_done.record()


def _forward(runner: Any, batch: Any, **_: Any) -> ModelRunnerOutput:
    if batch.forward_mode.is_decode():
        _Device.free_s = max(_Device.free_s, time.perf_counter()) + _Device.pass_s
    output = LogitsProcessorOutput(next_token_logits=None)
    output.next_token_logprobs = torch.zeros(len(batch.seq_lens))
    return ModelRunnerOutput(logits_output=output, can_run_graph=False)


def _sample(runner: Any, output: Any, batch: Any) -> torch.Tensor:
    ends = batch.extend_seq_lens.cumsum(0) - 1 if batch.forward_mode.is_extend() else slice(None)
    mixed = batch.input_ids[ends] * 31 + batch.seq_lens * 7919 + batch.sampling_info.sampling_seed
    tokens: torch.Tensor = (mixed * 2654435761 >> 8) % VOCAB + FIRST_TOKEN
    return tokens


def _set(context: Any, payload: bytes) -> bytes:
    overlaps, pass_s = payload.decode().split()
    scheduler = context._scheduler
    scheduler.device_module = SimpleNamespace(Event=_Event)
    ModelRunner.forward, ModelRunner.sample = _forward, _sample
    GenerationBatchResult.copy_to_cpu = _copy_to_cpu
    context.draft_worker.overlaps, _Device.pass_s = overlaps == "1", float(pass_s)
    return b""


RANK_CALLS[SET] = _set
