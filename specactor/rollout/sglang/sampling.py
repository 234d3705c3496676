"""A request's token does not depend on how its batch mates are sampled, and min-p works with a seed.

SGLang samples a whole batch with one routine. If any request of the batch has top-p or top-k, the noise of all is keyed
by the rank of a token among the sorted probabilities and no longer by its id, so a request without either
gets other tokens in such company than alone. Here each kind of request is sampled by the routine that it has when all
of the batch are of its kind, which is what SGLang does with a batch of one.

SGLang refuses min-p in the deterministic mode (an assertion that ends the engine): its weights are not normalised then.
The Gumbel-max trick does not need them to be. Tokens below the threshold, which is relative to the likeliest token, get
probability 0 before the sort; top-k and top-p keep or drop the others exactly as in SGLang's own order of the three.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_PER_ROW = ("top_ps", "top_ks", "min_ps", "sampling_seed", "temperatures")

Sample = Callable[..., tuple[Tensor, Any]]


def install() -> None:
    """Registers the hook with SGLang's plugin registry. Call it from a plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.layers.sampler.Sampler._sample_from_probs", sample_by_kind, HookType.AROUND)


def sample_by_kind(
    original: Sample, sampler: Any, probs: Tensor, info: Any, positions: Tensor, simple: bool
) -> tuple[Tensor, Any]:
    """(token ids [R] of int32, what SGLang captures of its sampling masks). Args: probs [R, V], positions [R]."""
    if simple or info.sampling_seed is None or info.sampling_mask_batch_indices is not None:
        return original(sampler, probs, info, positions, simple)
    if info.need_min_p_sampling:
        probs, info = _without_the_unlikely(probs, info)
    greedy_R = info.top_ks <= 1
    simple_R = _unfiltered(info)
    if not bool((greedy_R | simple_R).any()):
        return original(sampler, probs, info, positions, simple)
    tokens_R = probs.argmax(dim=-1).to(torch.int32)
    for rows_R, is_simple in ((simple_R, True), (~(greedy_R | simple_R), False)):
        rows = rows_R.nonzero().view(-1)
        if len(rows):
            part, _ = original(sampler, probs[rows], _of_rows(info, rows), positions[rows], is_simple)
            tokens_R[rows] = part.to(torch.int32)
    return tokens_R, None


def _without_the_unlikely(probs_RV: Tensor, info: Any) -> tuple[Tensor, Any]:
    """min-p applied: the remaining probabilities, and parameters that do not ask for it again."""
    threshold_R = probs_RV.max(dim=-1).values * info.min_ps
    applied = copy.copy(info)
    applied.need_min_p_sampling = False
    return probs_RV.masked_fill(probs_RV < threshold_R[:, None], 0.0), applied


def _unfiltered(info: Any) -> Tensor:
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    unfiltered: Tensor = (info.top_ps == 1.0) & (info.top_ks == TOP_K_ALL) & (info.min_ps <= 0.0)
    return unfiltered


def _of_rows(info: Any, rows: Tensor) -> Any:
    part = copy.copy(info)
    for name in _PER_ROW:
        setattr(part, name, getattr(info, name)[rows])
    return part
