"""beta is the best of the grid on what was verified before: nothing later, nothing that no verify reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specactor.cpu import sglang_ops as ops
from specactor.rollout.planning import sharpening
from specactor.rollout.planning.noise import Floats, Ints, gumbel
from specactor.rollout.planning.sharpening import GRID, MEMORY, Lane, Record, Sharpening

VOCAB = 24


@dataclass
class Positions:
    """Where a drafter with law q met a target with law p; the vocabulary is smaller than what a record keeps."""

    logp: Floats
    logq: Floats
    seeds: Ints
    where: Ints

    @classmethod
    def make(cls, count: int, *, scale: float, flatter: float = 1.0, off: float = 0.0, seed: int = 0) -> Positions:
        """Target logits of this scale; the drafter's are those, divided by `flatter`, with errors of size `off`."""
        rng = np.random.default_rng(seed)
        logits = scale * rng.standard_normal((count, VOCAB))
        wrong = logits / flatter + off * rng.standard_normal((count, VOCAB))
        return cls(_log_law(logits), _log_law(wrong), rng.integers(0, 2**31, count), rng.integers(0, 500, count))

    def __len__(self) -> int:
        return len(self.seeds)

    def part(self, first: int, last: int) -> Positions:
        return Positions(*(values[first:last] for values in (self.logp, self.logq, self.seeds, self.where)))

    def likely(self) -> tuple[Floats, Ints]:
        """What a record gets of the drafter: log q, likeliest first, and the tokens."""
        tokens = np.argsort(-self.logq, axis=1, kind="stable")
        return np.take_along_axis(self.logq, tokens, 1), tokens

    def drawn(self, logits: Floats) -> Ints:
        """By the engine's own sampling."""
        seeds, where = torch.tensor(self.seeds), torch.tensor(self.where)
        tokens: Ints = ops.sample_with_noise(torch.tensor(logits), seeds, where).view(-1).numpy()
        return tokens

    def targets(self) -> Ints:
        return self.drawn(self.logp)

    def drafts(self, beta: float) -> Ints:
        return self.logq.argmax(1) if math.isinf(beta) else self.drawn(np.float32(beta) * self.logq)

    def overlap(self) -> float:
        return float(np.minimum(np.exp(self.logp), np.exp(self.logq)).sum(1).mean())


def _log_law(logits: Floats) -> Floats:
    law: Floats = torch.log_softmax(torch.tensor(logits, dtype=torch.float32), dim=1).numpy()
    return law


def taught(positions: Positions, *, rounds: int = 1, into: Sharpening | None = None) -> Sharpening:
    fitted = into or Sharpening()
    size = -(-len(positions) // rounds)
    for first in range(0, len(positions), size):
        part = positions.part(first, first + size)
        logq, tokens = part.likely()
        fitted.observe(logq, gumbel(part.seeds, part.where, tokens), tokens, part.targets())
    return fitted


@pytest.mark.parametrize("beta", GRID)
def test_agreement_is_that_of_drafts_by_the_engine_s_sampling(beta: float) -> None:
    positions = Positions.make(600, scale=2.0, off=0.7)
    share = float((positions.drafts(beta) == positions.targets()).mean())
    assert taught(positions).agreement()[beta] == share
    assert 0.1 < share < 0.9


def test_one_is_shared_noise_and_infinity_is_greedy() -> None:
    positions = Positions.make(400, scale=2.0, off=0.7)
    np.testing.assert_array_equal(positions.drafts(1.0), positions.drawn(positions.logq))
    np.testing.assert_array_equal(positions.drafts(1e6), positions.drafts(math.inf))
    assert {1.0, math.inf} <= set(GRID)


def test_a_drafter_that_is_the_target_keeps_beta_one() -> None:
    positions = Positions.make(3000, scale=2.0)
    fitted = taught(positions, rounds=30)
    assert fitted.beta == 1.0
    assert fitted.agreement()[1.0] == pytest.approx(1.0)


def test_before_anything_is_known_the_noise_is_shared() -> None:
    fitted = Sharpening()
    assert fitted.beta == 1.0
    fitted.observe(np.zeros((0, 4)), np.zeros((0, 4)), np.zeros((0, 4), np.int64), np.zeros(0, np.int64))
    assert fitted.beta == 1.0


@pytest.mark.parametrize(
    ("scale", "flatter", "off", "betas"),
    [
        (2.0, 2.0, 0.0, {1.5, 2.0, 3.0}),  # half the target's logits
        (1.5, 0.6, 0.0, {0.5, 0.7}),  # a drafter too sure of itself
        (60.0, 60.0, 0.2, {3.0, 5.0, math.inf}),  # a target that is nearly certain
    ],
)
def test_beta_is_what_the_drafter_needs(scale: float, flatter: float, off: float, betas: set[float]) -> None:
    assert taught(Positions.make(4000, scale=scale, flatter=flatter, off=off), rounds=40).beta in betas


@pytest.mark.parametrize("scale", [0.7, 1.5, 3.0, 8.0])
@pytest.mark.parametrize("flatter", [0.8, 1.0, 1.8])
@pytest.mark.parametrize("off", [0.3, 1.0])
def test_the_fit_is_no_worse_than_either_limit_on_other_positions(scale: float, flatter: float, off: float) -> None:
    beta = taught(Positions.make(2000, scale=scale, flatter=flatter, off=off), rounds=20).beta
    others = Positions.make(6000, scale=scale, flatter=flatter, off=off, seed=1)
    targets = others.targets()
    share = {b: float((others.drafts(b) == targets).mean()) for b in (beta, 1.0, math.inf)}
    assert share[beta] >= max(share.values()) - 0.015  # near the border either beta may be chosen
    assert share[beta] >= 0.9 * others.overlap()  # the best coupling that knows p and q reaches all of it


def test_an_old_drafter_is_forgotten() -> None:
    fitted = taught(Positions.make(4000, scale=1.5, flatter=0.6), rounds=40)
    assert fitted.beta < 1
    taught(Positions.make(int(3 * MEMORY), scale=2.0, flatter=2.0, seed=1), rounds=40, into=fitted)
    assert fitted.beta > 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_beta_is_the_best_by_weights_that_fade(sizes: list[int], seed: int) -> None:
    """Against a sum over all single positions."""
    fitted, seen = Sharpening(), []
    for i, size in enumerate(sizes):
        positions = Positions.make(size, scale=1.5, off=1.0, seed=seed + i)
        taught(positions, into=fitted)
        targets = positions.targets()
        seen.append(np.array([(positions.drafts(beta) == targets).sum() for beta in GRID]))
        after = [sum(sizes[j + 1 : i + 1]) for j in range(i + 1)]
        scores = sum(math.exp(-n / MEMORY) * hits for n, hits in zip(after, seen, strict=True))
        assert fitted.agreement()[fitted.beta] == max(fitted.agreement().values())
        assert scores[GRID.index(fitted.beta)] == pytest.approx(scores.max(), abs=1e-6)


# ---------------------------------------------------------------------------------------------- rounds of a record

WINDOW = 4


@dataclass
class Round:
    """Lanes that draft WINDOW tokens each, and what the target emits."""

    positions: Positions
    """Of lane i at depth d: number i * WINDOW + d."""

    @property
    def lanes(self) -> list[Lane]:
        first = range(0, len(self.positions), WINDOW)
        return [Lane(f"r{i}", int(self.positions.seeds[i]), int(self.positions.where[i])) for i in first]

    @classmethod
    def make(cls, lanes: int, seed: int, *, flatter: float = 2.0) -> Round:
        """Positions of a lane follow one another, with one seed."""
        positions = Positions.make(lanes * WINDOW, scale=2.0, flatter=flatter, seed=seed)
        positions.seeds = np.repeat(positions.seeds[::WINDOW], WINDOW)
        positions.where = np.repeat(positions.where[::WINDOW], WINDOW) + np.tile(np.arange(WINDOW), lanes)
        return cls(positions)

    def emitted(self, beta: float) -> list[list[int]]:
        """Accepted tokens and the first other one."""
        found = []
        for lane in range(len(self.lanes)):
            here = slice(lane * WINDOW, (lane + 1) * WINDOW)
            drafts, targets = self.positions.drafts(beta)[here], self.positions.targets()[here]
            right = next((d for d in range(WINDOW) if drafts[d] != targets[d]), WINDOW)
            found.append([*targets[: right + 1].tolist(), *([0] if right == WINDOW else [])])
        return found

    def begin(self, record: Record) -> None:
        record.begin(list(self.lanes))
        for depth in range(WINDOW):
            logq, tokens = self.positions.part(0, len(self.positions)).likely()
            record.add(logq[depth::WINDOW], tokens[depth::WINDOW])

    def reached(self, emitted: Sequence[Sequence[int]]) -> Ints:
        """Numbers of the positions that follow right tokens."""
        return np.array(
            [lane * WINDOW + d for lane, tokens in enumerate(emitted) for d in range(min(len(tokens), WINDOW))]
        )


def play(rounds: Sequence[Round], *, peeks: bool = False) -> list[float]:
    """The beta of every round. The wrong version is told a round's outcome before it drafts."""
    fitted, record, used = Sharpening(), Record(), []
    for r in rounds:
        record.teach(fitted)
        r.begin(record)
        if peeks:
            taught(r.positions, into=fitted)
        used.append(fitted.beta)
        for lane, tokens in zip(r.lanes, r.emitted(used[-1]), strict=True):
            record.commit(lane.request_id, tokens)
    return used


@pytest.mark.parametrize("behind_a_rejection", [False, True])
def test_every_position_that_was_reached_teaches_and_no_other(behind_a_rejection: bool) -> None:
    """The wrong version learns from positions behind a rejection as well."""
    r, fitted, record = Round.make(12, 0), Sharpening(), Record()
    r.begin(record)
    emitted = r.emitted(1.0)
    for lane, tokens in zip(r.lanes, emitted, strict=True):
        record.commit(lane.request_id, [*tokens, *[0] * WINDOW] if behind_a_rejection else tokens)
    record.teach(fitted)
    reached = r.reached(emitted)
    assert len(reached) < len(r.positions)
    right = {beta: float((r.positions.drafts(beta) == r.positions.targets())[reached].mean()) for beta in GRID}
    assert (fitted.agreement() == pytest.approx(right)) != behind_a_rejection


@given(st.integers(1, 5), st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_a_round_is_drafted_by_the_rounds_before_alone(same: int, seed: int) -> None:
    past = [Round.make(6, seed + i) for i in range(same)]
    one, other = ([*past, Round.make(6, seed + 100 + i, flatter=flat)] for i, flat in enumerate((0.3, 3.0)))
    assert play(one)[: same + 1] == play(other)[: same + 1]


def test_peeking_would_be_noticed() -> None:
    one, other = ([Round.make(30, i, flatter=flat)] for i, flat in enumerate((0.3, 3.0)))
    assert play(one) == play(other) == [1.0]
    assert play(one, peeks=True) != play(other, peeks=True)


def test_ranks_that_see_the_same_agree() -> None:
    rounds = [Round.make(8, seed) for seed in range(6)]
    assert play(rounds) == play([replace(r) for r in rounds])


def test_lanes_without_an_outcome_teach_nothing() -> None:
    r, fitted, record = Round.make(3, 0), Sharpening(), Record()
    r.begin(record)
    record.teach(fitted)
    assert not any(fitted.agreement().values())
    logq, tokens = r.positions.likely()
    record.begin([None, None])  # greedy requests
    record.add(logq[:2], tokens[:2])
    record.commit("r0", [1, 2])
    record.teach(fitted)
    assert not any(fitted.agreement().values())


def test_a_large_round_teaches_from_first_drafts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharpening, "MAX_POSITIONS", 12)
    r, fitted, record = Round.make(12, 0, flatter=1.0), Sharpening(), Record()
    r.begin(record)
    for lane, tokens in zip(r.lanes, r.emitted(1.0), strict=True):
        record.commit(lane.request_id, tokens)
    record.teach(fitted)
    targets = r.positions.targets()[::WINDOW]
    for beta, share in fitted.agreement().items():
        assert share * 12 == pytest.approx((r.positions.drafts(beta)[::WINDOW] == targets).sum())
