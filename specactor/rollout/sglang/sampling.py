"""A request's token does not depend on how its batch mates are sampled.

Any top-p or top-k in a batch makes SGLang key the noise of all by rank, not id. Here each kind of row is sampled by
itself.

Shape legend: R rows, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from specactor.rollout.sglang.gpu import on_device

_PER_ROW = ("top_ps", "top_ks", "min_ps", "sampling_seed", "temperatures")

NOISE_ROWS = 128
"""Rows that are sampled at once: SGLang's noise takes 24 bytes per row and token of the vocabulary for a moment."""

Sample = Callable[..., tuple[Tensor, Any]]
Kind = Literal["greedy", "simple", "filtered"]
"""Of a row's sampling: the likeliest token, any, or one among those that top-p and top-k leave."""
_KINDS = "specactor_kinds"


def install() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.layers.sampler.Sampler._sample_from_probs", sample_by_kind, HookType.AROUND)
    HookRegistry.register("sglang.srt.layers.sampler.Sampler.forward", sample_in_one_pass, HookType.AROUND)


def sample_by_kind(
    original: Sample, sampler: Any, probs: Tensor, info: Any, positions: Tensor, simple: bool
) -> tuple[Tensor, Any]:
    """Return token ids [R] int32, and SGLang's sampling masks. Args: probs [R, V], positions [R]."""
    if info.sampling_seed is None or info.sampling_mask_batch_indices is not None:
        return original(sampler, probs, info, positions, simple)
    kinds: list[Kind] = ["simple"] * len(probs) if simple else kinds_of(info)
    vocabulary = probs.shape[-1]
    if len({*kinds}) == 1 and kinds[0] != "greedy" and len(kinds) in at_once(kinds[0], vocabulary):
        return original(sampler, probs, info, positions, kinds[0] == "simple")
    tokens_R = probs.argmax(dim=-1).to(torch.int32)
    named: tuple[Kind, ...] = ("simple", "filtered")
    for kind in named:
        rows = [row for row, of in enumerate(kinds) if of == kind]
        sizes = at_once(kind, vocabulary)
        for start in range(0, len(rows), sizes[-1]):
            some = rows[start : start + sizes[-1]]
            some *= 1 if len(some) in sizes else 2  # both get the same token
            some_R = on_device(some, probs.device)
            part, _ = original(sampler, probs[some_R], _of_rows(info, some_R), positions[some_R], kind == "simple")
            tokens_R[some_R] = part.to(torch.int32)
    return tokens_R, None


def at_once(kind: Kind, vocabulary: int) -> range:
    """Return the numbers of rows among which a row's token has the same bits."""
    if kind == "simple":
        return range(1, NOISE_ROWS + 1)
    # Top-p adds probabilities by PyTorch's scan, which on a GPU is another one for a row alone, and for more rows than
    # this has less than 512 threads for each.
    return range(2, max(2, min(NOISE_ROWS, vocabulary // 512)) + 1)


def sample_in_one_pass(
    original: Callable[..., Tensor],
    sampler: Any,
    output: Any,
    info: Any,
    return_logprob: bool,
    top_logprobs_nums: Sequence[int],
    token_ids_logprobs: Sequence[Any],
    positions: Tensor,
    **named: Any,
) -> Tensor:
    """Replace SGLang's `Sampler.forward` on a GPU, except for masks and log-probabilities of other tokens."""
    logits_RV = output.next_token_logits
    asked_more = info.sampling_mask_batch_indices is not None or any(of is not None for of in named.values())
    if return_logprob:
        asked_more |= any(top_logprobs_nums) or any(of is not None for of in token_ids_logprobs)
    if not serves(logits_RV) or info.sampling_seed is None or asked_more:
        return original(
            *(sampler, output, info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions), **named
        )
    from specactor.rollout.sglang import kernels

    logits_RV = sampler._preprocess_logits(logits_RV, info)
    drawn = kernels.draw(logits_RV, info.temperatures, info.sampling_seed, positions, info.top_ks <= 1)
    tokens_R = drawn.tokens.to(torch.int32)
    filters = info.need_top_p_sampling or info.need_top_k_sampling
    kinds = kinds_of(info) if filters and not info.is_all_greedy else []
    filtered = [row for row, of in enumerate(kinds) if of == "filtered"]
    most = at_once("filtered", logits_RV.shape[-1])[-1]
    for start in range(0, len(filtered), most):  # all rows of a round would take four times the logits' memory
        some = filtered[start : start + most]
        some_R = on_device(some, logits_RV.device)
        of_some = _of_rows(info, some_R)
        know_kinds(of_some, ["filtered"] * len(some))
        probs = torch.softmax(logits_RV[some_R] / of_some.temperatures, dim=-1)
        part, _ = sampler._sample_from_probs(probs, of_some, positions[some_R], False)
        tokens_R[some_R] = part.to(torch.int32)
    if return_logprob:
        output.next_token_logprobs = kernels.logprobs_of(tokens_R, logits_RV, info.temperatures, drawn)
    sampler._sync_token_ids_across_tp(tokens_R, info)
    return tokens_R


def serves(logits: Tensor) -> bool:
    """Return whether the kernel draws of these logits."""
    return logits.is_cuda


def kinds_of(info: Any) -> list[Kind]:
    """Return how each row is sampled, asking the device once per change of the batch."""
    known: tuple[list[Kind], Tensor | None] = getattr(info.top_ks, _KINDS, ([], None))
    kinds, top_ps = known
    if top_ps is not info.top_ps:  # they were read of these, too
        greedy_R, simple_R = torch.stack([info.top_ks <= 1, _unfiltered(info)]).tolist()
        return know_kinds(info, [_kind(*of) for of in zip(greedy_R, simple_R, strict=True)])
    return kinds


def know_kinds(info: Any, kinds: list[Kind]) -> list[Kind]:
    """Spare the device the question: SGLang copies `info` for every round, not its tensors."""
    setattr(info.top_ks, _KINDS, (kinds, info.top_ps))
    return kinds


def _kind(greedy: bool, simple: bool) -> Kind:
    return "greedy" if greedy else "simple" if simple else "filtered"


def _unfiltered(info: Any) -> Tensor:
    from sglang.srt.sampling.sampling_params import TOP_K_ALL

    unfiltered: Tensor = (info.top_ps == 1.0) & (info.top_ks == TOP_K_ALL)
    return unfiltered


def _of_rows(info: Any, rows: Tensor) -> Any:
    part = copy.copy(info)
    for name in _PER_ROW:
        setattr(part, name, getattr(info, name)[rows])
    return part
