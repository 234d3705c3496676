"""Acceptance computed offline: noise given a token, chains of accepted drafts, and the top-k beside a plain loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from specactor.trainer.drafter import acceptance
from tests.trainer.drafter import cases

V = 12


def law(seed: int) -> Tensor:
    return (2 * torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).log_softmax(0)


def agreement(noise_NV: Tensor, logq_V: Tensor, tokens_N: Tensor) -> float:
    return float(((logq_V + noise_NV).argmax(1) == tokens_N).double().mean())


def test_noise_given_the_token_is_that_of_the_coupling() -> None:
    """Draw noise, then the token; or the token, then noise given it: the same joint law, so the same agreement."""
    n, logp_V, logq_V = 40_000, law(0), law(1)
    chance = torch.Generator().manual_seed(0)
    prior_NV = -torch.empty(n, V, dtype=torch.float64).exponential_(generator=chance).log()
    tokens_N = (logp_V + prior_NV).argmax(1)
    given_NV = acceptance.noise_given(logp_V.expand(n, V), tokens_N, chance)
    assert torch.equal((logp_V + given_NV).argmax(1), tokens_N)
    assert agreement(given_NV, logq_V, tokens_N) == pytest.approx(agreement(prior_NV, logq_V, tokens_N), abs=0.012)
    assert float(given_NV.mean()) == pytest.approx(0.5772, abs=0.01)
    assert float(given_NV.var()) == pytest.approx(1.645, abs=0.03)
    fresh_NV = -torch.empty(n, V, dtype=torch.float64).exponential_(generator=chance).log()
    assert agreement(fresh_NV, logq_V, tokens_N) < agreement(prior_NV, logq_V, tokens_N) - 0.1, "noise must be shared"


@pytest.mark.parametrize(
    ("agrees", "window", "expected"),
    [
        ([[True] * 10], 4, 10 / 2),
        ([[False] * 3], 4, 1.0),
        ([[True, True, False, True, False]], 4, 5 / 2),
        ([[True, True, False, True, False]], 1, 5 / 3),
        ([[True] * 3, [False, False]], 8, 5 / 3),
        ([], 4, 1.0),
    ],
)
def test_accept_length_of_chains(agrees: list[list[bool]], window: int, expected: float) -> None:
    assert acceptance.accept_length([np.array(row)[:, None] for row in agrees], window) == pytest.approx(expected)


def test_measure_beside_a_plain_loop() -> None:
    target, draft, examples = cases.model(0), cases.model(1), cases.examples(12)
    found = acceptance.measure(target, draft, examples, window=4, seed=0, tokens_per_pass=60)
    overlap, entropy = [], []
    with torch.no_grad():
        for x in examples:
            ids = torch.tensor(x.token_ids[None].astype(np.int64))
            p, q = (m(input_ids=ids).logits[0].double().div(0.8).softmax(-1) for m in (target, draft))
            for t in range(x.prompt_len, len(x.token_ids)):
                overlap.append(float(torch.minimum(p[t - 1], q[t - 1]).sum()))
                entropy.append(float(-(p[t - 1] * p[t - 1].log()).sum()))
    assert found.tokens == len(overlap)
    assert found.overlap == pytest.approx(np.mean(overlap), abs=1e-5)
    assert found.entropy == pytest.approx(np.mean(entropy), abs=1e-5)


def test_a_draft_model_equal_to_the_target_is_always_accepted() -> None:
    model = cases.model()
    found = acceptance.measure(model, model, cases.examples(12), window=4, seed=0)
    assert (found.shared, found.overlap) == (1.0, pytest.approx(1.0))
    assert found.accept_length > 2.5


def test_the_top_k_is_the_targets_own() -> None:
    target, bare = cases.model(0), cases.examples(6, without_top_k_every=1)
    by_text = {x.token_ids.tobytes(): x for x in bare}
    for x in acceptance.with_top_k(target, bare, top_k=5, tokens_per_pass=60):
        assert x.prompt_len == by_text[x.token_ids.tobytes()].prompt_len
        assert x.top_k is not None
        with torch.no_grad():
            logits = target(input_ids=torch.tensor(x.token_ids[None].astype(np.int64))).logits[0]
        want = (logits / 0.8).log_softmax(-1)[x.prompt_len - 1 : -1].topk(5)
        assert x.top_k.tokens.tolist() == want.indices.tolist()
        np.testing.assert_allclose(x.top_k.logprobs, want.values.numpy(), rtol=1e-3, atol=1e-3)


def test_the_top_k_is_computed_as_long_as_there_is_time() -> None:
    passes = iter([True, True, False])
    some = acceptance.with_top_k(
        *(cases.model(0), cases.examples(12)),
        top_k=5,
        tokens_per_pass=60,
        go_on=lambda: next(passes),
    )
    assert 0 < len(some) < 12
    assert all(x.top_k is not None for x in some)
