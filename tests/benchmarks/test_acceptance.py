"""The figures of the acceptance benchmark against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.acceptance import BETAS, RUNNING, Sums, fitted, rounds
from benchmarks.acceptance_laws import Laws, drafted, entropy, overlap

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


def test_a_model_like_the_target_is_always_right_at_its_temperature_alone() -> None:
    logp = torch.log_softmax(2 * torch.randn(300, 12, dtype=torch.float64), dim=1)
    seeds, positions = torch.arange(300) * 7919, torch.arange(300) % 50
    tokens = drafted(logp, seeds, positions, 1.0)
    assert (drafted(logp, seeds, positions, 1.0) == tokens).all()
    assert 0 < (drafted(logp, seeds, positions, 1 / 1.5) != tokens).sum() < 300
    assert (drafted(logp, seeds, positions, 1e-9) == drafted(logp, seeds, positions, 0)).all()


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 5))
def test_rounds_are_those_of_decoding_token_by_token(hits: list[bool], window: int) -> None:
    emitted, expected = 1, []
    while emitted < len(hits):
        expected.append(emitted)
        for _ in range(window):
            right = emitted < len(hits) and hits[emitted]
            emitted += right
            if not right:
                break
        emitted += 1
    assert rounds(np.array(hits), window) == expected


def law_of(hits: np.ndarray) -> Laws:
    return Laws(overlap=[], entropy=[], hits=hits)


def test_the_fitted_temperature_is_the_best_of_the_past_and_knows_no_future() -> None:
    rng = np.random.default_rng(2)
    length, best = 60, BETAS.index(2.0)
    always = np.zeros((length, len(BETAS)), bool)
    always[:, best] = True
    rights = fitted([law_of(always)] * RUNNING)
    assert all(hits[1:].tolist() == [False] + [True] * (length - 2) for hits in rights), "1 before anything is known"
    found = [law_of(rng.random((length, len(BETAS))) < 0.5) for _ in range(RUNNING + 3)]
    before = fitted(found)
    for law in found[:RUNNING]:
        law.hits[30:] ^= True
    for hits, changed in zip(before[:RUNNING], fitted(found), strict=False):
        assert hits[:30].tolist() == changed[:30].tolist()


def test_sums_are_of_prompts_and_leave_the_first_tokens_out() -> None:
    sums = Sums.of([np.array(hits, bool) for hits in ([1, 1, 0], [0, 1], [1], [0, 0, 0])], group_size=2)
    assert (sums.accepted.tolist(), sums.tokens.tolist()) == ([2, 0], [3, 2])
    assert (sums.rounds.tolist(), sums.begun.tolist()) == ([2, 2], [2, 0])
    share, length = sums.figures(np.array([[0, 0], [0, 1]]))
    assert share.tolist() == [4 / 6, 2 / 5]
    assert length.tolist() == [6 / 4, 5 / 4]
