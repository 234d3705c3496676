"""Lessons as padded tensors: each position of the loss against a loop, and the spread over ranks."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor.trainer.distillation import batches, losses
from tests.trainer.distillation.cases import VOCAB, lesson, lessons

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=20), st.integers(1, 5), st.integers(1, 120))
def test_every_lesson_is_in_one_micro_batch_that_fits(lengths: list[int], ranks: int, capacity: int) -> None:
    plan = batches.plan(lengths, ranks, capacity)
    assert len(plan) == ranks
    assert len({len(of_rank) for of_rank in plan}) == 1
    members = [members for of_rank in plan for members in of_rank]
    assert sorted(i for part in members for i in part) == list(range(len(lengths)))
    for part in members:
        assert len(part) <= 1 or len(part) * max(lengths[i] for i in part) <= capacity
    if not all(members):
        assert max(map(len, members)) <= 1, "none is empty where another has lessons to share"


def test_each_position_predicts_the_token_after_it() -> None:
    given_lessons = lessons(7)
    weights = [np.arange(x.response_len) + 1.0 for x in given_lessons]
    batch = batches.build(given_lessons, weights, CPU)
    flat, n = batch.tokens_BT.flatten(), 0
    for x, weight in zip(given_lessons, weights, strict=True):
        for t in range(x.prompt_len, len(x.token_ids)):
            assert flat[batch.row_N[n]] == x.token_ids[t - 1]
            assert batch.targets_N[n] == x.token_ids[t]
            assert batch.weights_N[n] == weight[t - x.prompt_len]
            assert bool(batch.has_law_N[n]) == (x.law is not None)
            if x.law is not None:
                assert batch.top_tokens_NK[n].tolist() == x.law.tokens[t - x.prompt_len].tolist()
                assert batch.top_logp_NK[n].tolist() == x.law.logprobs[t - x.prompt_len].tolist()
            n += 1
    assert n == len(batch.targets_N) == len(batch.temperatures_N)


def test_without_lessons_nothing_is_learned_from() -> None:
    batch = batches.build([], [], CPU)
    assert batch.tokens_BT.shape == (1, 1)
    assert len(batch.targets_N) == len(batch.row_N) == 0


def test_laws_of_two_widths_have_the_smaller_one() -> None:
    """After a resume with another top_k. Padding would be tokens of no probability, which make no finite loss."""
    rng = np.random.default_rng(0)
    mixed = [lesson(rng, top_k=top_k) for top_k in (8, 3, 0, 8)]
    batch = batches.build(mixed, [np.ones(x.response_len) for x in mixed], CPU)
    assert batch.top_tokens_NK.shape[1] == 3
    start = 0
    for x in mixed:
        there = slice(start, start + x.response_len)
        assert bool((batch.has_law_N[there] == (x.law is not None)).all())
        if x.law is not None:
            assert batch.top_tokens_NK[there].tolist() == x.law.tokens[:, :3].tolist()
            assert batch.top_logp_NK[there].tolist() == x.law.logprobs[:, :3].tolist()
        start += x.response_len
    logq_NV = torch.randn(len(batch.targets_N), VOCAB, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    logq_NV.requires_grad_()
    found = losses.terms(logq_NV, batch.targets_N, batch.top_tokens_NK, batch.top_logp_NK, batch.has_law_N)
    found.law.sum().backward()
    assert bool(found.law.isfinite().all())
    assert logq_NV.grad is not None
    assert bool(logq_NV.grad.isfinite().all())


def test_the_width_is_one_for_all_micro_batches_of_an_update() -> None:
    """Or losses would depend on how lessons are spread over ranks."""
    rng = np.random.default_rng(0)
    cut = batches.of_one_width([lesson(rng, top_k=top_k) for top_k in (8, 3, 0)])
    assert [x.law.tokens.shape[1] if x.law else None for x in cut] == [3, 3, None]
    assert batches.of_one_width([]) == []
