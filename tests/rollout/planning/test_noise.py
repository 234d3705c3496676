"""The noise of a few tokens is the noise that sampling adds, bit for bit."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specactor.cpu import sglang_ops as ops
from specactor.rollout.planning.noise import Floats, gumbel
from tests.cpu.test_sglang_ops import murmur3_x86_32
from tests.rollout.conftest import start_script

SEEDS = st.one_of(st.integers(0, 2**31 - 1), st.sampled_from([0, 1, 2**31 - 1, 2**32, 2**33 + 5]))
ROWS, VOCAB = 400, 60


@dataclass
class Rows:
    """Laws, each with a seed and a position."""

    logprobs: torch.Tensor
    seeds: np.ndarray[tuple[int], np.dtype[np.int64]]
    positions: np.ndarray[tuple[int], np.dtype[np.int64]]

    @classmethod
    def make(cls) -> Rows:
        torch.manual_seed(3)
        rng = np.random.default_rng(3)
        return cls(
            torch.log_softmax(torch.randn(ROWS, VOCAB) * torch.linspace(0.1, 6, ROWS)[:, None], dim=-1),
            rng.integers(0, 2**31, ROWS),
            rng.integers(0, 10_000, ROWS),
        )

    def choices(self, noise: Floats) -> list[int]:
        chosen: list[int] = (self.logprobs.numpy() + noise).argmax(1).tolist()
        return chosen

    def noise(self, *, shift: int = 0) -> Floats:
        return gumbel(self.seeds, self.positions + shift, np.tile(np.arange(VOCAB), (ROWS, 1)))


@given(SEEDS, st.integers(0, 200_000), st.lists(st.integers(0, 200_000), min_size=1, max_size=4))
def test_noise_is_that_of_the_published_hash(seed: int, position: int, tokens: list[int]) -> None:
    got = gumbel(np.array([seed]), np.array([position]), np.array([tokens]))[0]
    for noise, token in zip(got, tokens, strict=True):
        x = murmur3_x86_32([seed & 0xFFFFFFFF, seed >> 32, position, token]) / (2**32 - 1)
        log_x = math.log(x) if x else float(np.finfo(np.float64).min)
        assert noise == pytest.approx(-math.log(-min(log_x, -(2.0**-32))), rel=1e-12)


def test_choices_are_those_of_the_engine_s_sampling() -> None:
    rows = Rows.make()
    sampled = ops.sample_with_noise(rows.logprobs, torch.tensor(rows.seeds), torch.tensor(rows.positions))
    assert rows.choices(rows.noise()) == sampled.view(-1).tolist()
    assert rows.choices(rows.noise(shift=1)) != sampled.view(-1).tolist()


def test_choices_are_those_of_sglang_s_own_function() -> None:
    rows = Rows.make()
    with start_script("planning/sglang_sample.py") as process:
        question = json.dumps([rows.logprobs.tolist(), rows.seeds.tolist(), rows.positions.tolist()])
        told, _ = process.communicate(question + "\n", timeout=240)
    [line] = [line for line in told.splitlines() if line.startswith("TOKENS ")]
    assert rows.choices(rows.noise()) == json.loads(line.removeprefix("TOKENS "))


def test_the_order_of_rows_and_tokens_does_not_matter() -> None:
    rows = Rows.make()
    order, tokens = np.random.default_rng(0).permutation(ROWS), np.random.default_rng(1).permutation(VOCAB)
    shuffled = gumbel(rows.seeds[order], rows.positions[order], np.tile(tokens, (ROWS, 1)))
    np.testing.assert_array_equal(shuffled, rows.noise()[order][:, tokens])
