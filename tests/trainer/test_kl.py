"""KL estimates: exact expectations over a small vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specactor.trainer.losses import KlKind, kl_T
from tests.trainer.loss_cases import VOCAB, Table, finite_difference, log_softmax

Kl = Callable[[Tensor, Tensor, KlKind], Tensor]


def check_kl(kind: KlKind, estimate: Kl = kl_T) -> None:
    """Exact expectations over the vocabulary, at one context: value KL(p || q); gradient of the named divergence."""
    generator = torch.Generator().manual_seed(5)
    logits_V, ref_V = (torch.randn(VOCAB, generator=generator, dtype=torch.float64) for _ in range(2))

    def probabilities(row: list[float]) -> list[float]:
        return [math.exp(log_softmax(row, v)) for v in range(VOCAB)]

    q = probabilities(ref_V.tolist())

    def reverse_kl(table: Table) -> float:
        return sum(p * math.log(p / q[v]) for v, p in enumerate(probabilities(table[0])))

    def forward_kl(table: Table) -> float:
        return sum(q[v] * math.log(q[v] / p) for v, p in enumerate(probabilities(table[0])))

    theta = logits_V.clone().requires_grad_()
    logprobs_V = torch.log_softmax(theta, dim=-1)
    kl_V = estimate(logprobs_V, torch.log_softmax(ref_V, dim=-1), kind)
    p_V = logprobs_V.exp().detach()
    assert (p_V * kl_V).sum().item() == pytest.approx(reverse_kl([logits_V.tolist()]), abs=1e-12)
    if kind == "k3":
        assert (kl_V >= 0).all()
    (gradient,) = torch.autograd.grad((p_V * kl_V).sum(), theta)
    divergence = {"k1": reverse_kl, "k3": forward_kl}[kind]
    want = finite_difference(divergence, [logits_V.tolist()])[0]
    torch.testing.assert_close(gradient, want, atol=1e-8, rtol=0)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_kl_value_and_gradient_are_unbiased(kind: KlKind) -> None:
    check_kl(kind)


def _k1_differentiated(logprobs_T: Tensor, ref_T: Tensor, kind: KlKind) -> Tensor:
    return logprobs_T - ref_T


def _k3_swapped(logprobs_T: Tensor, ref_T: Tensor, kind: KlKind) -> Tensor:
    return kl_T(ref_T, logprobs_T, kind)


def _k3_swapped_but_differentiable(logprobs_T: Tensor, ref_T: Tensor, kind: KlKind) -> Tensor:
    d_T = logprobs_T - ref_T
    return torch.exp(d_T) - 1 - d_T


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [("k1", _k1_differentiated), ("k1", _k3_swapped), ("k3", _k3_swapped_but_differentiable)],
)
def test_a_wrong_kl_is_caught(kind: KlKind, wrong: Kl) -> None:
    with pytest.raises(AssertionError):
        check_kl(kind, wrong)


def test_swapped_arguments_of_kl_reach_no_gradient() -> None:
    logprobs_T = torch.tensor([-1.0, -2.0], requires_grad=True)
    assert not _k3_swapped(logprobs_T, torch.tensor([-1.5, -1.0]), "k3").requires_grad


def test_k3_is_accurate_near_the_reference_and_finite_far_from_it() -> None:
    near = kl_T(torch.tensor([-1.0]), torch.tensor([-1.001]), "k3").item()
    assert near == pytest.approx(0.5e-6, rel=0.2)
    assert kl_T(torch.tensor([-500.0]), torch.tensor([-1.0]), "k3").isfinite().all()
