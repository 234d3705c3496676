"""Log-probabilities and entropies over a vocabulary that is sharded over ranks. The backward pass overwrites the one
(T, V) buffer, so a second one is an error of autograd.

Shapes: T tokens; K top-k; V entries of the vocabulary on this rank (rank r holds ids r*V .. (r+1)*V - 1).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**25}
"""Elements of the rows that are worked through at once: 4 MiB in float32 stay in a CPU's cache, while a GPU waits for
the host at the start of every kernel, of which 4 MiB take ten (a vocabulary of 151,936: 27 rows of four ranks)."""


def vocab_parallel_logprobs(
    logits_TV: Tensor, targets_T: Tensor, *, temperature: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return (log-probability of each target, entropy) of softmax(logits / temperature), in nats, at least float32.
    Rows, `targets_T` (ids in the whole vocabulary) and results are the same on every rank of `group` (None: this one
    holds all). Entropies have no gradient."""
    if group is not None and dist.get_world_size(group) == 1:
        group = None
    outputs: tuple[Tensor, Tensor] = _VocabParallelLogprobs.apply(  # type: ignore[no-untyped-call]
        logits_TV, targets_T, temperature, group
    )
    return outputs


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, targets_T: Tensor, temperature: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        local_T, mine_T = _local_targets(targets_T, logits_TV.shape[1], group)
        buffer_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32), copy=True).div_(temperature)
        max_T = _all_reduce(buffer_TV.amax(dim=-1), dist.ReduceOp.MAX, group)
        target_T = (buffer_TV.gather(1, local_T[:, None])[:, 0] - max_T).masked_fill_(~mine_T, 0.0)
        sum_T, moment_T = _exponentiate(buffer_TV, max_T)
        sum_T, moment_T, target_T = _all_reduce(
            torch.stack([sum_T, moment_T, target_T]), dist.ReduceOp.SUM, group
        ).unbind()
        entropy_T = sum_T.log() - moment_T / sum_T  # H = log Z - sum p x, with p = exp(x) / Z
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(buffer_TV.div_(sum_T[:, None]), local_T, mine_T)
        ctx.temperature, ctx.dtype = temperature, logits_TV.dtype
        ctx.mark_non_differentiable(entropy_T)
        ctx.set_materialize_grads(False)
        return target_T - sum_T.log(), entropy_T

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_T: Tensor | None, _grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        if grad_T is None:
            return None, None, None, None
        grad_TV, local_T, mine_T = ctx.saved_tensors
        grad_T = grad_T / ctx.temperature  # d logprob / d logit_v = (1[v = target] - p_v) / temperature
        grad_TV.mul_(-grad_T[:, None])
        grad_TV.scatter_add_(1, local_T[:, None], (grad_T * mine_T)[:, None])
        return grad_TV.to(ctx.dtype), None, None, None


def _local_targets(targets_T: Tensor, shard_size: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Return (each target's column in this shard, or 0; whether it is there)."""
    start = 0 if group is None else dist.get_rank(group) * shard_size
    local_T = targets_T - start
    mine_T = (local_T >= 0) & (local_T < shard_size)
    return local_T.masked_fill(~mine_T, 0), mine_T


def _exponentiate(buffer_TV: Tensor, max_T: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits into exp(x), x = logit - max, in place; return sums of exp(x) and exp(x) x."""
    sum_T, moment_T = torch.empty_like(max_T), torch.empty_like(max_T)
    rows = _rows_at_once(buffer_TV)
    lowest = torch.finfo(buffer_TV.dtype).min  # a logit of -inf would make exp(x) x = 0 * inf
    for start in range(0, buffer_TV.shape[0], rows):
        part = slice(start, start + rows)
        x_CV = buffer_TV[part].sub_(max_T[part, None]).clamp_(min=lowest)
        exp_CV = x_CV.exp()
        sum_T[part] = exp_CV.sum(dim=-1)
        moment_T[part] = x_CV.mul_(exp_CV).sum(dim=-1)
        buffer_TV[part] = exp_CV
    return sum_T, moment_T


def _rows_at_once(values_TV: Tensor) -> int:
    return max(1, CHUNK_ELEMENTS[values_TV.device.type] // max(1, values_TV.shape[1]))


def _all_reduce(tensor: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> Tensor:
    if group is not None and tensor.numel() > 0:
        dist.all_reduce(tensor, op, group=group)
    return tensor


@torch.no_grad()
def vocab_parallel_top_k(
    logits_TV: Tensor, k: int, *, temperature: float, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return (ids [T, K] int64, log-probabilities [T, K] float32) of softmax(logits / temperature), best first, on
    every rank of `group` (None: this one holds all), K <= `k`."""
    if group is not None and dist.get_world_size(group) == 1:
        group = None
    ranks = 1 if group is None else dist.get_world_size(group)
    rows = _rows_at_once(logits_TV)
    parts = [_of_shard(logits_TV[start : start + rows], k, temperature) for start in range(0, len(logits_TV), rows)]
    width = min(k, logits_TV.shape[1])
    if not parts:
        nothing = logits_TV.new_zeros((0, min(k, ranks * logits_TV.shape[1])), dtype=torch.float32)
        return nothing.long(), nothing
    values_TK, ids_TK, log_sum_T = (torch.cat(column) for column in zip(*parts, strict=True))
    if group is not None:
        ids_TK += dist.get_rank(group) * logits_TV.shape[1]
        mine = torch.cat([values_TK, log_sum_T[:, None]], dim=1)
        all_mine = [torch.empty_like(mine) for _ in range(ranks)]
        all_ids = [torch.empty_like(ids_TK) for _ in range(ranks)]
        dist.all_gather(all_mine, mine, group=group)
        dist.all_gather(all_ids, ids_TK, group=group)
        log_sum_T = torch.stack([part[:, -1] for part in all_mine]).logsumexp(0)
        values_TK = torch.cat([part[:, :width] for part in all_mine], dim=1)
        ids_TK = torch.cat(all_ids, dim=1)
        values_TK, best = values_TK.topk(min(k, values_TK.shape[1]), dim=1)
        ids_TK = ids_TK.gather(1, best)
    return ids_TK, values_TK - log_sum_T[:, None]


def _of_shard(logits_CV: Tensor, k: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    scaled_CV = logits_CV.to(torch.float32) / temperature
    values, columns = scaled_CV.topk(min(k, scaled_CV.shape[1]), dim=1)
    return values, columns, scaled_CV.logsumexp(1)
