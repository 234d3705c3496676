"""The figures of the acceptance benchmark against brute force, and what counts as reached and accepted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.acceptance import Draft, rate
from benchmarks.acceptance_laws import Laws, agreement, entropy, overlap
from specactor.cpu import sglang_ops as ops
from specactor.rollout.planning.noise import gumbel

WEIGHTS = st.lists(st.integers(0, 5), min_size=4, max_size=4).filter(any)


def log_law(weights: list[int]) -> torch.Tensor:
    values = torch.tensor(weights, dtype=torch.float64)
    return (values / values.sum()).log()


@given(WEIGHTS, WEIGHTS)
def test_overlap_is_one_minus_the_largest_difference_of_any_event(p: list[int], q: list[int]) -> None:
    """The definition of total variation, over all sets of tokens."""
    laws = log_law(p), log_law(q)
    first, second = (law.exp().tolist() for law in laws)
    events = [[v for v in range(4) if bits >> v & 1] for bits in range(16)]
    variation = max(abs(sum(first[v] for v in event) - sum(second[v] for v in event)) for event in events)
    assert float(overlap(laws[0][None], laws[1][None])[0]) == pytest.approx(1 - variation)


@given(WEIGHTS)
def test_entropy_is_the_mean_surprise(p: list[int]) -> None:
    law = log_law(p).exp().tolist()
    assert float(entropy(log_law(p)[None])[0]) == pytest.approx(sum(-x * math.log(x) for x in law if x))


def test_agreement_is_that_of_sampled_drafts() -> None:
    torch.manual_seed(0)
    logq = torch.log_softmax(2 * torch.randn(300, 12, dtype=torch.float64), dim=1)
    seeds, positions = np.arange(300) * 7919, np.arange(300) % 50
    noise = gumbel(seeds, positions, np.tile(np.arange(12), (300, 1)))
    tokens = torch.randint(12, (300,)).tolist()
    for beta in (0.5, 1.0, 2.0):
        drafts = ops.sample_with_noise(beta * logq, torch.tensor(seeds), torch.tensor(positions)).view(-1).tolist()
        expected = [draft == token for draft, token in zip(drafts, tokens, strict=True)]
        assert agreement(logq.numpy(), noise, tokens, beta) == expected
    greedy = [likeliest == token for likeliest, token in zip(logq.argmax(1).tolist(), tokens, strict=True)]
    assert agreement(logq.numpy(), noise, tokens, math.inf) == greedy


@pytest.mark.parametrize(
    ("tokens", "emitted", "accepted", "reached"),
    [
        ([5, 6, 7], (5, 6, 7, 8), 3, 3),  # all right; the bonus was not drafted
        ([5, 6, 7], (5, 9, 7), 1, 2),  # what follows a wrong token is no context of the target
        ([4, 6, 7], (5, 6, 7), 0, 1),
        ([5, 6, 7], (5, 6), 2, 2),  # the response ended
    ],
)
def test_reached_are_the_accepted_and_the_one_after(
    tokens: list[int], emitted: tuple[int, ...], accepted: int, reached: int
) -> None:
    draft = Draft(request_id="r", start=0, tokens=tokens, emitted=emitted, beta=1.0)
    assert (draft.accepted, draft.reached) == (accepted, reached)


def test_rates_and_overlaps_are_of_the_same_positions() -> None:
    drafts = [
        Draft(request_id="r", start=1, tokens=[5, 6, 7], emitted=(5, 9, 7, 1), beta=1.0),  # tokens 1 and 2
        Draft(request_id="r", start=3, tokens=[4, 4], emitted=(7, 1), beta=1.0),  # token 3
    ]
    laws = {"r": Laws(overlap=[0.0, 0.9, 0.6, 0.3, 0.0], entropy=[0.0] * 5)}
    whole, first = rate(drafts, laws), rate(drafts, laws, first_only=True)
    assert (whole.rate, whole.overlap) == pytest.approx((1 / 3, 0.6))
    assert (first.rate, first.overlap) == pytest.approx((1 / 2, 0.6))
    assert whole.error == pytest.approx((1 / 3 * 2 / 3 / 3) ** 0.5)
