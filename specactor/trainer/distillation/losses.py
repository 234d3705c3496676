"""The draft model's loss per token: cross entropy of the policy's samples, and divergence from its likeliest tokens.

In expectation over samples both have the same gradient, that of KL(policy, draft); the divergence has less noise, and
the samples know the tokens beyond the likeliest K. So where a law is not known, the cross entropy takes its weight.

Shape legend: N response tokens, V vocabulary, K likeliest tokens of the policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Of every token, in nats; [N] each."""

    sample: Tensor
    """-log q(sampled token)."""
    law: Tensor
    """KL(policy, draft) over K tokens and the rest; 0 where no law is known."""
    overlap: Tensor
    """sum of min(p, q) over the same: at least 1 - TV, equal for K = V; nan where no law is known. No gradient."""


def log_draft(logits_NV: Tensor, temperatures_N: Tensor) -> Tensor:
    """log q [N, V], float32, at the temperature that the policy was sampled at: drafters sample at the same."""
    return (logits_NV.float() / temperatures_N[:, None]).log_softmax(-1)


def terms(logq_NV: Tensor, tokens_N: Tensor, top_tokens_NK: Tensor, top_logp_NK: Tensor, has_law_N: Tensor) -> Terms:
    """Args: sampled tokens; likeliest tokens of the policy and their log-probabilities; where these are known (what
    stands elsewhere does not matter)."""
    sample_N = -logq_NV.gather(1, tokens_N[:, None])[:, 0]
    if not top_tokens_NK.shape[1] or not bool(has_law_N.any()):
        return Terms(sample=sample_N, law=torch.zeros_like(sample_N), overlap=torch.full_like(sample_N, torch.nan))
    law_N = forward_kl(logq_NV, top_tokens_NK, top_logp_NK).where(has_law_N, torch.zeros_like(sample_N))
    with torch.no_grad():
        overlap_N = overlap(logq_NV, top_tokens_NK, top_logp_NK).where(has_law_N, torch.nan)
    return Terms(sample=sample_N, law=law_N, overlap=overlap_N)


def per_token(found: Terms, has_law_N: Tensor, *, sample_weight: float, law_weight: float) -> Tensor:
    """[N] loss: law_weight * KL + sample_weight * cross entropy, or both weights on the latter without a law."""
    both = sample_weight + law_weight
    return torch.where(has_law_N, sample_weight * found.sample + law_weight * found.law, both * found.sample)


def forward_kl(logq_NV: Tensor, top_tokens_NK: Tensor, top_logp_NK: Tensor) -> Tensor:
    """[N] KL(p, q) of the distributions over the K tokens and one more that stands for all others.

    Never more than KL over the vocabulary, equal to it for K = V, and 0 only where q = p on the K tokens.
    """
    logq_NK = logq_NV.gather(1, top_tokens_NK)
    logp_NK = top_logp_NK.float()
    kl_N = (logp_NK.exp() * (logp_NK - logq_NK)).sum(1)
    rest_N = _rest(logp_NK)
    if logq_NV.shape[1] == top_tokens_NK.shape[1]:
        return kl_N
    log_rest_q_N = logq_NV.scatter(1, top_tokens_NK, -torch.inf).logsumexp(1)
    return kl_N + torch.xlogy(rest_N, rest_N) - rest_N * log_rest_q_N


def overlap(logq_NV: Tensor, top_tokens_NK: Tensor, top_logp_NK: Tensor) -> Tensor:
    """[N] sum of min(p, q) over the K tokens and the rest."""
    q_NK, p_NK = logq_NV.gather(1, top_tokens_NK).exp(), top_logp_NK.float().exp()
    rest_q_N = (1 - q_NK.sum(1)).clamp(min=0)
    return torch.minimum(p_NK, q_NK).sum(1) + torch.minimum(_rest(top_logp_NK.float()), rest_q_N)


def _rest(logp_NK: Tensor) -> Tensor:
    """[N] probability of all other tokens; in half precision the K may sum to a little more than 1."""
    return (1 - logp_NK.exp().sum(1)).clamp(min=0)
