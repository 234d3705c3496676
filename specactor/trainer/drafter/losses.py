"""The draft model's loss: its distance from the policy, on padded batches.

Invariant: an example's loss does not depend on its neighbours.

Shapes: B examples, T tokens of the longest, N response tokens of all, V vocabulary, K top-k, F numbers of hidden
states.
"""

# ruff: noqa: N815 - tensor fields carry shape suffixes

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specactor.config.train import PART_LOGITS
from specactor.trainer.drafter.buffer import TrainingExample

LossesOf = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Batch:
    tokens_BT: Tensor
    row_N: Tensor  # which of the B * T positions predict a response token: those before it
    place_N: Tensor  # of a token in its response, from 0
    targets_N: Tensor
    temperatures_N: Tensor
    top_tokens_NK: Tensor
    top_logp_NK: Tensor
    has_top_k_N: Tensor
    states_BTF: Tensor | None = None  # the policy's, for a head

    def rows(self, part: slice) -> Batch:
        """Return these of the N rows."""
        return replace(self, **{name: value[part] for name, value in vars(self).items() if "_N" in name})


def plan_micro_batches(lengths: Sequence[int], ranks: int, capacity: int) -> list[list[list[int]]]:
    """Return per rank its micro-batches of indices; neighbours in length are together. Rows * longest is at most
    `capacity`, or it is one example; all ranks have the same number, empty only where none has two examples."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    made: list[list[int]] = []
    for i in order:
        if made and (len(made[-1]) + 1) * lengths[made[-1][0]] <= capacity:
            made[-1].append(i)
        else:
            made.append([i])
    while len(made) % ranks:
        sizes = [len(members) * lengths[members[0]] if len(members) > 1 else 0 for members in made]
        largest = sizes.index(max(sizes))
        half = (len(made[largest]) + 1) // 2  # rather than leaving ranks without work
        made[largest : largest + 1] = [made[largest][:half], made[largest][half:]]
    return [made[rank::ranks] for rank in range(ranks)]


def build(examples: Sequence[TrainingExample], device: torch.device) -> Batch:
    longest = max((len(example.token_ids) for example in examples), default=1)
    width = next((example.top_k.tokens.shape[1] for example in examples if example.top_k), 0)
    tokens = np.zeros((max(1, len(examples)), longest), np.int64)
    for row, example in zip(tokens, examples, strict=False):
        row[: len(example.token_ids)] = example.token_ids  # padded on the right, where a causal mask hides it
    sizes = [example.response_len for example in examples]
    rows = [
        np.arange(example.prompt_len - 1, len(example.token_ids) - 1) + i * longest
        for i, example in enumerate(examples)
    ]
    top_tokens = np.zeros((sum(sizes), width), np.int64)
    top_logp = np.full((sum(sizes), width), -np.inf, np.float32)
    known = np.zeros(sum(sizes), np.bool_)
    start = 0
    for example, size in zip(examples, sizes, strict=True):
        if example.top_k is not None:
            there = slice(start, start + size)
            top_tokens[there], top_logp[there] = example.top_k.tokens, example.top_k.logprobs
            known[there] = True
        start += size
    states = [example.states for example in examples if example.states is not None]
    return Batch(
        tokens_BT=torch.from_numpy(tokens).to(device),
        row_N=_joined(rows, np.int64, device),
        place_N=_joined([np.arange(size) for size in sizes], np.int64, device),
        targets_N=_joined([example.token_ids[example.prompt_len :] for example in examples], np.int64, device),
        temperatures_N=_joined([np.full(x.response_len, x.temperature) for x in examples], np.float32, device),
        top_tokens_NK=torch.from_numpy(top_tokens).to(device),
        top_logp_NK=torch.from_numpy(top_logp).to(device),
        has_top_k_N=torch.from_numpy(known).to(device),
        states_BTF=pad_sequence(states, batch_first=True).float().to(device) if states else None,
    )


def draft_logprobs(logits_NV: Tensor, temperatures_N: Tensor) -> Tensor:
    """Return log q [N, V], float32, at the temperature that the policy was sampled at."""
    return (logits_NV.float() / temperatures_N[:, None]).log_softmax(-1)


def by_parts(losses_of: LossesOf, logits_MV: Tensor, row_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return (loss [N], overlap [N]) by `losses_of` of these rows, a few at once. Their gradient takes the place of the
    logits, which nobody else may use: backward passes are made once."""
    each = max(1, PART_LOGITS // logits_MV.shape[1])
    if len(row_N) <= each:
        return losses_of(logits_MV.index_select(0, row_N), slice(None))
    parts = [slice(start, start + each) for start in range(0, len(row_N), each)]
    loss_N, overlap_N = _ByParts.apply(logits_MV, row_N, losses_of, parts)  # type: ignore[no-untyped-call]
    return loss_N, overlap_N


class _ByParts(torch.autograd.Function):
    """PyTorch's own checkpoints would hold the logits of all rows three times."""

    @staticmethod
    def forward(
        ctx: Any, logits_MV: Tensor, row_N: Tensor, losses_of: LossesOf, parts: Sequence[slice]
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(logits_MV, row_N)
        ctx.given = losses_of, parts
        found = [losses_of(logits_MV.index_select(0, row_N[part]), part) for part in parts]
        loss_N, overlap_N = (torch.cat(of) for of in zip(*found, strict=True))
        ctx.mark_non_differentiable(overlap_N)
        return loss_N, overlap_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        saved_MV, row_N = ctx.saved_tensors
        logits_MV, (losses_of, parts) = saved_MV.detach(), ctx.given
        for part in parts:
            logits_PV = logits_MV.index_select(0, row_N[part]).requires_grad_()
            with torch.enable_grad():
                loss_P, _ = losses_of(logits_PV, part)
            (gradient_PV,) = torch.autograd.grad(loss_P, logits_PV, grad_N[part])
            logits_MV.index_copy_(0, row_N[part], gradient_PV)
        others_M = torch.ones_like(logits_MV[:, 0], dtype=torch.bool).index_fill_(0, row_N, False)
        return logits_MV.masked_fill_(others_M[:, None], 0.0), None, None, None


def token_losses(logq_NV: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return (loss [N] in nats, overlap [N]): KL(policy, draft) where the top-k is known, else the sampled token's
    cross entropy, which has the same gradient in expectation."""
    sample_N = -logq_NV.gather(1, batch.targets_N[:, None])[:, 0]
    if not batch.top_tokens_NK.shape[1] or not bool(batch.has_top_k_N.any()):
        return sample_N, torch.zeros_like(sample_N)
    kl_N = forward_kl(logq_NV, batch.top_tokens_NK, batch.top_logp_NK)
    with torch.no_grad():
        overlap_N = overlap(logq_NV, batch.top_tokens_NK, batch.top_logp_NK)
    return kl_N.where(batch.has_top_k_N, sample_N), overlap_N.where(batch.has_top_k_N, torch.zeros_like(sample_N))


def forward_kl(logq_NV: Tensor, top_tokens_NK: Tensor, top_logp_NK: Tensor) -> Tensor:
    """[N] KL(p, q) over the K tokens and one for all others: at most the vocabulary's, equal for K = V, 0 only where q
    = p on the K."""
    logq_NK = logq_NV.gather(1, top_tokens_NK)
    logp_NK = top_logp_NK.float()
    kl_N = (logp_NK.exp() * (logp_NK - logq_NK)).sum(1)
    rest_N = _probability_of_others(logp_NK)
    if logq_NV.shape[1] == top_tokens_NK.shape[1]:
        return kl_N
    log_rest_q_N = logq_NV.scatter(1, top_tokens_NK, -torch.inf).logsumexp(1)
    return kl_N + torch.xlogy(rest_N, rest_N) - rest_N * log_rest_q_N


def overlap(logq_NV: Tensor, top_tokens_NK: Tensor, top_logp_NK: Tensor) -> Tensor:
    """[N] sum of min(p, q) over the K tokens and the rest: at least 1 - TV, equal for K = V."""
    q_NK, p_NK = logq_NV.gather(1, top_tokens_NK).exp(), top_logp_NK.float().exp()
    rest_q_N = (1 - q_NK.sum(1)).clamp(min=0)
    return torch.minimum(p_NK, q_NK).sum(1) + torch.minimum(_probability_of_others(top_logp_NK.float()), rest_q_N)


def _probability_of_others(logp_NK: Tensor) -> Tensor:
    return (1 - logp_NK.exp().sum(1)).clamp(min=0)  # in half precision the K may sum to a little more than 1


def _joined(parts: Sequence[NDArray[Any]], kind: type, device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(kind) if parts else np.zeros(0, kind)).to(device)
