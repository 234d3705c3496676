"""The draft model's losses against loops over Python floats, with wrong versions that are caught."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specactor.trainer.drafter import losses
from tests.trainer.drafter.cases import examples

N, V, K = 6, 11, 4


def policies(seed: int = 0, k: int = K) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(draft logits, policy log-probabilities, top-k tokens, sampled tokens)"""
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
    logits_NV, logp_NV, top_NK, _ = policies(seed, k)
    logq_NV = losses.draft_logprobs(logits_NV, torch.full((N,), 0.7))
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


def test_kl_is_bounded_by_the_whole_and_zero_only_for_the_same() -> None:
    logits_NV, logp_NV, top_NK, _ = policies()
    logq_NV = logits_NV.log_softmax(-1)
    whole_N = (logp_NV.exp() * (logp_NV - logq_NV)).sum(1)
    part_N = losses.forward_kl(logq_NV, top_NK, logp_NV.gather(1, top_NK))
    assert bool((part_N > 0).all())
    assert bool((part_N <= whole_N + 1e-6).all())
    same_N = losses.forward_kl(logp_NV, top_NK, logp_NV.gather(1, top_NK))
    assert same_N.abs().max() < 1e-6


def test_gradients_are_finite_where_the_policy_is_certain_or_rounded() -> None:
    logits_NV = torch.zeros(2, V, requires_grad=True)
    certain = torch.tensor([[0.0, -math.inf], [1e-4, -9.0]])  # the second sums to more than 1, as float16 may
    top = torch.tensor([[3, 4], [3, 4]])
    losses.forward_kl(logits_NV.log_softmax(-1), top, certain.clamp(min=-1e4)).sum().backward()
    assert logits_NV.grad is not None
    assert bool(logits_NV.grad.isfinite().all())


def test_overlap_is_that_of_a_loop() -> None:
    logits_NV, logp_NV, top_NK, _ = policies()
    logq_NV = losses.draft_logprobs(logits_NV, torch.full((N,), 0.7))
    got = losses.overlap(logq_NV, top_NK, logp_NV.gather(1, top_NK))
    for n in range(N):
        _, want = reference(logits_NV[n].tolist(), logp_NV[n].tolist(), top_NK[n].tolist(), 0.7)
        assert got[n].item() == pytest.approx(want, abs=1e-5)
    assert bool((got + 1e-6 >= torch.minimum(logp_NV.exp(), logq_NV.exp()).sum(1)).all())


def batch_of(tokens_N: Tensor, top_NK: Tensor, top_logp_NK: Tensor, known_N: Tensor) -> losses.Batch:
    """As the loss reads it."""
    nothing = torch.zeros(0)
    return losses.Batch(
        tokens_BT=nothing,
        row_N=nothing,
        place_N=nothing,
        temperatures_N=nothing,
        targets_N=tokens_N,
        top_tokens_NK=top_NK,
        top_logp_NK=top_logp_NK,
        has_top_k_N=known_N,
    )


def test_without_a_top_k_the_loss_is_that_of_the_sample() -> None:
    logits_NV, logp_NV, top_NK, tokens_N = policies()
    known_N = torch.tensor([True, False] * 3)
    logq_NV = logits_NV.log_softmax(-1)
    top_logp = logp_NV.gather(1, top_NK).masked_fill(~known_N[:, None], -math.inf)
    loss_N, overlap_N = losses.token_losses(logq_NV, batch_of(tokens_N, top_NK, top_logp, known_N))
    assert ((overlap_N == 0) == ~known_N).all()
    sample_N = torch.tensor([-logq_NV[n, t].item() for n, t in enumerate(tokens_N.tolist())])
    kl_N = losses.forward_kl(logq_NV, top_NK, logp_NV.gather(1, top_NK))
    torch.testing.assert_close(loss_N, torch.where(known_N, kl_N, sample_N))


def test_both_losses_have_the_same_gradient_in_expectation() -> None:
    """The cross entropy, averaged over the policy's own samples, and the divergence over the whole vocabulary."""
    logits_NV, logp_NV, _, _ = policies()
    leaf = logits_NV[:1].clone().requires_grad_()
    every = torch.arange(V)[None]
    (of_kl,) = torch.autograd.grad(
        losses.forward_kl(leaf.log_softmax(-1), every, logp_NV[:1].gather(1, every)).sum(), leaf
    )
    rows = leaf.log_softmax(-1).expand(V, V)
    none = torch.zeros(V, 0, dtype=torch.int64)
    sample_V, _ = losses.token_losses(
        rows, batch_of(torch.arange(V), none, none.float(), torch.zeros(V, dtype=torch.bool))
    )
    (of_samples,) = torch.autograd.grad((logp_NV[0].exp() * sample_V).sum(), leaf)
    torch.testing.assert_close(of_kl, of_samples, atol=1e-6, rtol=1e-5)


# --- training examples as tensors

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 40), max_size=20), st.integers(1, 5), st.integers(1, 120))
def test_every_example_is_in_one_micro_batch_that_fits(lengths: list[int], ranks: int, capacity: int) -> None:
    plan = losses.plan_micro_batches(lengths, ranks, capacity)
    assert len(plan) == ranks
    assert len({len(of_rank) for of_rank in plan}) == 1
    members = [members for of_rank in plan for members in of_rank]
    assert sorted(i for part in members for i in part) == list(range(len(lengths)))
    for part in members:
        assert len(part) <= 1 or len(part) * max(lengths[i] for i in part) <= capacity
    if not all(members):
        assert max(map(len, members)) <= 1, "none is empty where another has examples to share"


def test_each_position_predicts_the_token_after_it() -> None:
    given_examples = examples(7)
    batch = losses.build(given_examples, CPU)
    flat, n = batch.tokens_BT.flatten(), 0
    for x in given_examples:
        for t in range(x.prompt_len, len(x.token_ids)):
            assert flat[batch.row_N[n]] == x.token_ids[t - 1]
            assert batch.targets_N[n] == x.token_ids[t]
            assert bool(batch.has_top_k_N[n]) == (x.top_k is not None)
            if x.top_k is not None:
                assert batch.top_tokens_NK[n].tolist() == x.top_k.tokens[t - x.prompt_len].tolist()
                assert batch.top_logp_NK[n].tolist() == x.top_k.logprobs[t - x.prompt_len].tolist()
            n += 1
    assert n == len(batch.targets_N) == len(batch.temperatures_N)


def test_without_examples_nothing_is_learned_from() -> None:
    batch = losses.build([], CPU)
    assert batch.tokens_BT.shape == (1, 1)
    assert len(batch.targets_N) == len(batch.row_N) == 0
