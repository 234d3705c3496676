"""A drafter that runs ahead learns what one inside the engine learns, and nothing from its own drafts."""

from __future__ import annotations

import numpy as np
import pytest

from specactor.rollout.planning.hindsight import MAX_KEPT, Hindsight
from specactor.rollout.planning.noise import gumbel
from specactor.rollout.planning.sharpening import Lane, Record, Sharpening

SEED, BASE = 77, 10
"""Of the noise; tokens of the prompt."""


def likely(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    logq_K = np.sort(rng.normal(size=8))[::-1]
    return logq_K, rng.permutation(50)[:8]


def expect(hindsight: Hindsight, at: int, logq_K: np.ndarray, tokens_K: np.ndarray, key: str = "r") -> None:
    hindsight.expect(key, at, seed=SEED, position=BASE + at - 1, logq_K=logq_K, tokens_K=tokens_K)


def counted(sharpening: Sharpening) -> float:
    return sharpening._weight


def test_it_learns_what_a_drafter_in_the_engine_learns() -> None:
    rng = np.random.default_rng(3)
    record, inside, hindsight, ahead = Record(), Sharpening(), Hindsight(), Sharpening()
    output: list[int] = []
    for _ in range(40):
        places = [likely(rng) for _ in range(4)]
        record.begin([Lane("r", SEED, BASE + len(output) - 1)])
        for depth, (logq_K, tokens_K) in enumerate(places):
            record.add(logq_K[None], tokens_K[None])
            expect(hindsight, len(output) + depth, logq_K, tokens_K)
        accepted = int(rng.integers(4))
        start = len(output)
        output += [int(rng.choice(tokens_K)) for _, tokens_K in places[: accepted + 1]]
        record.commit("r", output[start:])
        record.teach(inside)
        hindsight.judge("r", output, agreed=start + accepted, committed=len(output))
        hindsight.teach(ahead)
    assert counted(ahead) == pytest.approx(counted(inside))
    assert ahead.agreement() == pytest.approx(inside.agreement())
    assert max(ahead.agreement().values()) > 0


def test_the_target_with_this_noise_is_always_agreed_with() -> None:
    rng = np.random.default_rng(4)
    hindsight, sharpening = Hindsight(), Sharpening()
    output: list[int] = []
    for at in range(60):
        logq_K, tokens_K = likely(rng)
        expect(hindsight, at, logq_K, tokens_K)
        noise_1K = gumbel(np.array([SEED]), np.array([BASE + at - 1]), tokens_K[None])
        output.append(int(tokens_K[(logq_K + noise_1K[0]).argmax()]))
        hindsight.judge("r", output, agreed=at, committed=at + 1)
    hindsight.teach(sharpening)
    assert sharpening.agreement()[1.0] == pytest.approx(1.0)
    assert sharpening.agreement()[float("inf")] < 0.9


def test_drafts_that_the_target_has_not_seen_teach_nothing() -> None:
    rng = np.random.default_rng(5)
    hindsight, sharpening = Hindsight(), Sharpening()
    for at in range(5):
        expect(hindsight, at, *likely(rng))
    hindsight.judge("r", [1] * 5, agreed=5, committed=0)
    hindsight.teach(sharpening)
    assert counted(sharpening) == 0
    hindsight.judge("r", [1] * 5, agreed=5, committed=2)
    hindsight.teach(sharpening)
    assert counted(sharpening) == 2
    hindsight.judge("r", [1] * 5, agreed=5, committed=2)
    hindsight.teach(sharpening)
    assert counted(sharpening) == 2, "a position teaches once"


def test_positions_after_a_token_that_was_replaced_teach_nothing() -> None:
    rng = np.random.default_rng(6)
    hindsight, sharpening = Hindsight(), Sharpening()
    for at in range(5):
        expect(hindsight, at, *likely(rng))
    hindsight.judge("r", [1, 1, 9, 9, 9], agreed=2, committed=5)
    hindsight.teach(sharpening)
    assert 2.9 < counted(sharpening) <= 3, "tokens 0 and 1, and token 2, which was another than drafted"


def test_memory_is_bounded_and_forgotten() -> None:
    rng = np.random.default_rng(7)
    hindsight, sharpening = Hindsight(), Sharpening()
    count = MAX_KEPT + 30
    for key in ("r", "gone"):
        for at in range(count):
            expect(hindsight, at, *likely(rng), key=key)
    hindsight.forget("gone")
    for key in ("r", "gone", "unknown"):
        hindsight.judge(key, [1] * count, agreed=count, committed=count)
    hindsight.teach(sharpening)
    assert MAX_KEPT - 3 < counted(sharpening) <= MAX_KEPT
