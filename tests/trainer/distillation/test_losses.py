"""The draft model's losses against loops over Python floats, with wrong versions that are caught."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specactor.trainer.distillation import losses

N, V, K = 6, 11, 4


def laws(seed: int = 0, k: int = K) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(draft logits, policy log-probabilities, likeliest tokens, sampled tokens)"""
    chance = torch.Generator().manual_seed(seed)
    logits_NV = 2 * torch.randn(N, V, generator=chance)
    logp_NV = (2 * torch.randn(N, V, generator=chance)).log_softmax(-1)
    return logits_NV, logp_NV, logp_NV.topk(k, dim=1).indices, torch.randint(V, (N,), generator=chance)


def reference(logits: list[float], logp: list[float], kept: list[int], temperature: float) -> tuple[float, float]:
    """(KL, overlap) of the distributions over the kept tokens and the rest, in floats."""
    scaled = [x / temperature for x in logits]
    z = sum(math.exp(x) for x in scaled)
    q = [math.exp(x) / z for x in scaled]
    p = [math.exp(x) for x in logp]
    pairs = [(p[v], q[v]) for v in kept]
    others = [v for v in range(len(p)) if v not in kept]
    if others:
        pairs.append((sum(p[v] for v in others), sum(q[v] for v in others)))
    return sum(a * math.log(a / b) for a, b in pairs if a > 0), sum(min(a, b) for a, b in pairs)


def assert_kl(kl_of, k: int, seed: int = 0) -> None:  # type: ignore[no-untyped-def]
    logits_NV, logp_NV, top_NK, _ = laws(seed, k)
    logq_NV = losses.log_draft(logits_NV, torch.full((N,), 0.7))
    got = kl_of(logq_NV, top_NK, logp_NV.gather(1, top_NK))
    for n in range(N):
        want, _ = reference(logits_NV[n].tolist(), logp_NV[n].tolist(), top_NK[n].tolist(), 0.7)
        assert got[n].item() == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("k", [1, K, V - 1, V])
def test_kl_is_that_of_a_loop(k: int) -> None:
    assert_kl(losses.forward_kl, k)


def reversed_kl(logq_NV: Tensor, top_NK: Tensor, top_logp_NK: Tensor) -> Tensor:
    logq_NK = logq_NV.gather(1, top_NK)
    return (logq_NK.exp() * (logq_NK - top_logp_NK)).sum(1)


def without_the_rest(logq_NV: Tensor, top_NK: Tensor, top_logp_NK: Tensor) -> Tensor:
    return (top_logp_NK.exp() * (top_logp_NK - logq_NV.gather(1, top_NK))).sum(1)


@pytest.mark.parametrize(("wrong", "k"), [(reversed_kl, V), (without_the_rest, K)])
def test_wrong_divergences_are_caught(wrong, k: int) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(AssertionError):
        assert_kl(wrong, k)


def test_kl_is_bounded_by_the_whole_and_zero_only_for_the_same_law() -> None:
    logits_NV, logp_NV, top_NK, _ = laws()
    logq_NV = logits_NV.log_softmax(-1)
    whole_N = (logp_NV.exp() * (logp_NV - logq_NV)).sum(1)
    part_N = losses.forward_kl(logq_NV, top_NK, logp_NV.gather(1, top_NK))
    assert bool((part_N > 0).all())
    assert bool((part_N <= whole_N + 1e-6).all())
    same_N = losses.forward_kl(logp_NV, top_NK, logp_NV.gather(1, top_NK))
    assert same_N.abs().max() < 1e-6


def test_gradients_are_finite_where_the_law_is_certain_or_rounded() -> None:
    logits_NV = torch.zeros(2, V, requires_grad=True)
    certain = torch.tensor([[0.0, -math.inf], [1e-4, -9.0]])  # the second sums to more than 1, as float16 may
    top = torch.tensor([[3, 4], [3, 4]])
    losses.forward_kl(logits_NV.log_softmax(-1), top, certain.clamp(min=-1e4)).sum().backward()
    assert logits_NV.grad is not None
    assert bool(logits_NV.grad.isfinite().all())


def test_overlap_is_that_of_a_loop() -> None:
    logits_NV, logp_NV, top_NK, _ = laws()
    logq_NV = losses.log_draft(logits_NV, torch.full((N,), 0.7))
    got = losses.overlap(logq_NV, top_NK, logp_NV.gather(1, top_NK))
    for n in range(N):
        _, want = reference(logits_NV[n].tolist(), logp_NV[n].tolist(), top_NK[n].tolist(), 0.7)
        assert got[n].item() == pytest.approx(want, abs=1e-5)
    assert bool((got + 1e-6 >= torch.minimum(logp_NV.exp(), logq_NV.exp()).sum(1)).all())


def test_without_a_law_the_sample_takes_its_weight() -> None:
    logits_NV, logp_NV, top_NK, tokens_N = laws()
    known_N = torch.tensor([True, False] * 3)
    logq_NV = logits_NV.log_softmax(-1)
    top_logp = logp_NV.gather(1, top_NK).masked_fill(~known_N[:, None], -math.inf)
    found = losses.terms(logq_NV, tokens_N, top_NK, top_logp, known_N)
    assert bool((found.law[~known_N] == 0).all())
    assert found.overlap.isnan().tolist() == (~known_N).tolist()
    got = losses.per_token(found, known_N, sample_weight=0.25, law_weight=0.5)
    sample_N = torch.tensor([-logq_NV[n, t].item() for n, t in enumerate(tokens_N.tolist())])
    want = torch.where(known_N, 0.25 * sample_N + 0.5 * found.law, 0.75 * sample_N)
    torch.testing.assert_close(got, want)


def test_both_losses_have_the_same_gradient_in_expectation() -> None:
    """The cross entropy, averaged over the policy's own samples, and the divergence over the whole vocabulary."""
    logits_NV, logp_NV, _, _ = laws()
    leaf = logits_NV[:1].clone().requires_grad_()
    every = torch.arange(V)[None]
    (of_law,) = torch.autograd.grad(
        losses.forward_kl(leaf.log_softmax(-1), every, logp_NV[:1].gather(1, every)).sum(), leaf
    )
    rows = leaf.log_softmax(-1).expand(V, V)
    sample_V = losses.terms(
        rows, torch.arange(V), torch.zeros(V, 0, dtype=torch.int64), torch.zeros(V, 0), torch.zeros(V, dtype=torch.bool)
    ).sample
    (of_samples,) = torch.autograd.grad((logp_NV[0].exp() * sample_V).sum(), leaf)
    torch.testing.assert_close(of_law, of_samples, atol=1e-6, rtol=1e-5)
