"""A penalty counts every token that its request has emitted, and penalties are applied in one order.

SGLang counts while a request decodes, one token per round. Two things follow. A request with penalties is not drafted
for (`SamplingParams.has_penalties`): its later rows would need counts that hold the drafts before them, and its rounds
emit one token each, as in plain decoding. And a request that is taken out of the batch and prefilled again would start
to count anew: here what it had emitted is counted first.

With overlap (a round is prepared while another runs) SGLang counts a token one round late, and in the first round of a
request the last token that it was given. That is one of what was begun of its response, if it goes on from there, and
would count twice. So engines whose requests have penalties (`EngineSpec.penalties`) run without overlap, as those that
speculate do.

With overlap SGLang adds up what is taken off the logits, and divides by the repetition penalty afterwards. Without, it
applies one penalty after the other as they lie in a set, which differs from process to process. Here it is always the
former, so that all engines give the same bits.

Shape legend: B requests, V vocabulary, N tokens that one request has emitted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specactor.rollout.sglang import partial_response


def install() -> None:
    """Registers the hook with SGLang's plugin registry. Call it from a plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    made = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
    HookRegistry.register(made, _count_emitted, HookType.AFTER)
    applied = "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.apply"
    HookRegistry.register(applied, _apply_in_order, HookType.AROUND)


def has_penalties(sampling_params: Any) -> bool:
    """`SamplingParams.has_penalties` of SGLang's class of that name."""
    p = sampling_params
    return (p.frequency_penalty, p.presence_penalty, p.repetition_penalty) != (0.0, 0.0, 1.0)


def _count_emitted(info: Any, _: type, batch: Any, *__: Any) -> None:
    """Sampling parameters were made for a batch that is prefilled: count what its requests emitted before, here and in
    what they brought along of their responses."""
    orchestrator = info.penalizer_orchestrator
    if not orchestrator.is_required:
        return
    for row, req in enumerate(batch.reqs):
        emitted = [*partial_response.of(req), *req.output_ids]
        if not emitted:
            continue
        tokens_N = torch.tensor(emitted, dtype=torch.int64, device=info.temperatures.device)
        for penalizer in orchestrator.penalizers.values():
            for kind in ("frequency", "presence", "repetition"):
                total_BV = getattr(penalizer, f"cumulated_{kind}_penalties", None)
                if total_BV is None:
                    continue
                each_N = getattr(penalizer, f"{kind}_penalties")[row].expand(len(tokens_N))
                if kind == "frequency":
                    total_BV[row].scatter_add_(0, tokens_N, each_N)
                else:
                    total_BV[row].scatter_(0, tokens_N, each_N)


def _apply_in_order(
    original: Callable[..., None], orchestrator: Any, logits: Tensor, repeat: int | None = None
) -> None:
    """What SGLang does with overlap (`SamplingBatchInfo.update_penalties`). Args: logits [B, V], changed in place."""
    from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

    if repeat is not None:
        original(orchestrator, logits, repeat)
        return
    additive_BV = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    orchestrator.accumulate_additive_penalties(additive_BV)
    logits.add_(additive_BV)
    scaling_BV = orchestrator.accumulate_scaling_penalties()
    if scaling_BV is not None:
        apply_scaling_penalties(logits, scaling_BV)
