"""A request's token does not depend on how its batch mates are sampled; min-p works with a seed, and penalties count
all that was emitted, in one order.

SGLang samples a whole batch with one routine. If any request of the batch has top-p or top-k, the noise of all is keyed
by the rank of a token among the sorted probabilities and no longer by its id, so a request without either
gets other tokens in such company than alone. Here each kind of request is sampled by the routine that it has when all
of the batch are of its kind, which is what SGLang does with a batch of one.

SGLang refuses min-p in the deterministic mode (an assertion that ends the engine): its weights are not normalised then.
The Gumbel-max trick does not need them to be. Tokens below the threshold, which is relative to the likeliest token, get
probability 0 before the sort; top-k and top-p keep or drop the others exactly as in SGLang's own order of the three.

SGLang counts what penalties are for while a request decodes, one token per round. So a request with penalties is not
drafted for (its later rows would need counts that hold the drafts before them), and one that is taken out of the batch
and prefilled again would start to count anew: here what it had emitted is counted first. With overlap (a round is
prepared while another runs) SGLang counts a token one round late, and the last one given twice; so engines whose
requests have penalties (`EngineSpec.penalties`) run without, and those that speculate do so in rounds with such
requests (`overlap`). Penalties are added up first and the repetition penalty
divides afterwards, as SGLang does with overlap; without, it takes them as they lie in a set, which differs from process
to process.

On a GPU rows are drawn by one kernel (`kernels.draw`), in plain rounds and verifications; SGLang's routine serves
those with top-p, top-k or min-p alone, and the kernel gives their log-probabilities, too.

Shape legend: B requests, R rows, V vocabulary, N tokens that one request has emitted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from specactor.rollout.sglang import partial_response

_PER_ROW = ("top_ps", "top_ks", "min_ps", "sampling_seed", "temperatures")

NOISE_ROWS = 128
"""Rows that are sampled at once: SGLang's noise takes 24 bytes per row and token of the vocabulary for a moment."""

Sample = Callable[..., tuple[Tensor, Any]]
Kind = Literal["greedy", "simple", "filtered"]
"""Of a row's sampling: the likeliest token, any, or one among those that top-p, top-k and min-p leave."""
_KINDS = "specactor_kinds"


def install() -> None:
    """Registers the hooks with SGLang's plugin registry. Call it from a plugin."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.layers.sampler.Sampler._sample_from_probs", sample_by_kind, HookType.AROUND)
    HookRegistry.register("sglang.srt.layers.sampler.Sampler.forward", sample_in_one_pass, HookType.AROUND)
    made = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
    HookRegistry.register(made, _count_emitted, HookType.AFTER)
    applied = "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.apply"
    HookRegistry.register(applied, _apply_in_order, HookType.AROUND)


def sample_by_kind(
    original: Sample, sampler: Any, probs: Tensor, info: Any, positions: Tensor, simple: bool
) -> tuple[Tensor, Any]:
    """(token ids [R] of int32, what SGLang captures of its sampling masks). Args: probs [R, V], positions [R]."""
    if info.sampling_seed is None or info.sampling_mask_batch_indices is not None:
        return original(sampler, probs, info, positions, simple)
    kinds: list[Kind] = ["simple"] * len(probs) if simple else kinds_of(info)
    if info.need_min_p_sampling:
        probs, info = _without_the_unlikely(probs, info)
    if len({*kinds}) == 1 and kinds[0] != "greedy" and len(kinds) <= NOISE_ROWS:
        return original(sampler, probs, info, positions, kinds[0] == "simple")
    tokens_R = probs.argmax(dim=-1).to(torch.int32)
    for kind in ("simple", "filtered"):
        rows = [row for row, of in enumerate(kinds) if of == kind]
        for start in range(0, len(rows), NOISE_ROWS):
            some_R = torch.tensor(rows[start : start + NOISE_ROWS], device=probs.device)
            part, _ = original(sampler, probs[some_R], _of_rows(info, some_R), positions[some_R], kind == "simple")
            tokens_R[some_R] = part.to(torch.int32)
    return tokens_R, None


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
    """SGLang's `Sampler.forward` where there is a GPU. What nobody asks of these engines goes the old way: masks of
    what could be sampled, log-probabilities of other tokens. Returns [R] int32."""
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
    filters = info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling
    kinds = kinds_of(info) if filters and not info.is_all_greedy else []
    if filtered := [row for row, of in enumerate(kinds) if of == "filtered"]:
        some_R = torch.tensor(filtered, device=logits_RV.device)
        of_some = _of_rows(info, some_R)
        know_kinds(of_some, ["filtered"] * len(filtered))
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


class _Known(NamedTuple):
    """This is what was read from the device."""

    kinds: list[Kind]
    beside: tuple[Tensor, Tensor]
    """top-p and min-p that it was read of, too."""


def kinds_of(info: Any) -> list[Kind]:
    """Return how each row is sampled. The device is asked once per change of the batch: then it has other tensors."""
    known: _Known | None = getattr(info.top_ks, _KINDS, None)
    if known is None or known.beside[0] is not info.top_ps or known.beside[1] is not info.min_ps:
        greedy_R, simple_R = torch.stack([info.top_ks <= 1, _unfiltered(info)]).tolist()
        return know_kinds(info, [_kind(*of) for of in zip(greedy_R, simple_R, strict=True)])
    return known.kinds


def know_kinds(info: Any, kinds: list[Kind]) -> list[Kind]:
    """Spare the device the question of `kinds_of`. SGLang copies `info` for every round, and not its tensors."""
    setattr(info.top_ks, _KINDS, _Known(kinds, (info.top_ps, info.min_ps)))
    return kinds


def _kind(greedy: bool, simple: bool) -> Kind:
    return "greedy" if greedy else "simple" if simple else "filtered"


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
    """Do what SGLang does with overlap (`SamplingBatchInfo.update_penalties`). Args: logits [B, V], changed in
    place."""
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
