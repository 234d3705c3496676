"""KL estimates: exact expectations over a small vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specactor.trainer.losses import kl_T
from tests.trainer.loss_cases import VOCAB, Table, finite_difference, log_softmax

Kl = Callable[[Tensor, Tensor], Tensor]


def check_kl(estimate: Kl = kl_T) -> None:
    """Exact expectations over the vocabulary, at one context: value KL(p || q); gradient of KL(q || p)."""
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
    kl_V = estimate(logprobs_V, torch.log_softmax(ref_V, dim=-1))
    p_V = logprobs_V.exp().detach()
    assert (p_V * kl_V).sum().item() == pytest.approx(reverse_kl([logits_V.tolist()]), abs=1e-12)
    assert (kl_V >= 0).all()
    (gradient,) = torch.autograd.grad((p_V * kl_V).sum(), theta)
    want = finite_difference(forward_kl, [logits_V.tolist()])[0]
    torch.testing.assert_close(gradient, want, atol=1e-8, rtol=0)


def test_kl_value_and_gradient_are_unbiased() -> None:
    check_kl()


def _k1(logprobs_T: Tensor, ref_T: Tensor) -> Tensor:
    return logprobs_T - ref_T


def _k3_swapped(logprobs_T: Tensor, ref_T: Tensor) -> Tensor:
    return kl_T(ref_T, logprobs_T)


def _k3_swapped_but_differentiable(logprobs_T: Tensor, ref_T: Tensor) -> Tensor:
    d_T = logprobs_T - ref_T
    return torch.exp(d_T) - 1 - d_T


@pytest.mark.parametrize("wrong", [_k1, _k3_swapped, _k3_swapped_but_differentiable])
def test_a_wrong_kl_is_caught(wrong: Kl) -> None:
    with pytest.raises((AssertionError, RuntimeError)):  # swapped, it has no gradient at all
        check_kl(wrong)


def test_swapped_arguments_of_kl_reach_no_gradient() -> None:
    logprobs_T = torch.tensor([-1.0, -2.0], requires_grad=True)
    assert not _k3_swapped(logprobs_T, torch.tensor([-1.5, -1.0])).requires_grad


def test_k3_is_accurate_near_the_reference_and_finite_far_from_it() -> None:
    near = kl_T(torch.tensor([-1.0]), torch.tensor([-1.001])).item()
    assert near == pytest.approx(0.5e-6, rel=0.2)
    assert kl_T(torch.tensor([-500.0]), torch.tensor([-1.0])).isfinite().all()
