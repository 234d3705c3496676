"""Estimates use the past alone, stay probabilities, and find the truth whatever the windows were."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.rollout.speculation.acceptance import AcceptanceModel, Floats
from tests.rollout.speculation.world import survival

W = 6
REQUESTS = st.sampled_from(["a", "b", "c"])


@st.composite
def verifies(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """(request, asked, drafted, accepted); windows beyond the model's are among them."""
    asked = draw(st.integers(0, W + 2))
    drafted = draw(st.integers(0, asked))
    return draw(REQUESTS), asked, drafted, draw(st.integers(0, drafted))


HISTORIES = st.lists(verifies(), max_size=30)
Verify = tuple[str, int, int, int]


def learn(model: AcceptanceModel, history: list[Verify]) -> AcceptanceModel:
    for request, asked, drafted, accepted in history:
        model.observe(request, drafted, accepted, asked=asked)
    return model


@given(HISTORIES, st.floats(0, 1))
def test_survival_is_a_falling_probability(history: list[Verify], weight: float) -> None:
    model = learn(AcceptanceModel(max_window=W, memory=10), history)
    for _ in range(2):
        for request in ("a", "b", "c", "new"):
            for covered in (False, True):
                probabilities = survival(model, request, covered=covered)
                assert len(probabilities) == W
                assert all(0 <= later <= before <= 1 for before, later in pairwise([1.0, *probabilities]))
        assert 0 < model.rate < 1
        model.new_version(weight)


@given(HISTORIES, st.floats(0, 1))
def test_many_requests_at_once_have_the_same_bits(history: list[Verify], weight: float) -> None:
    model = learn(AcceptanceModel(max_window=W, memory=10), history)
    model.new_version(weight)
    ids = ["c", "new", "a", "b"]
    for told in ([], [0, 3, 0, 1]):
        model.tell(ids, told)
        model.observe("b", 2, 1)
    assert model.survivals(ids, covered=False).tolist() == [survival(model, name) for name in ids]
    assert model.survivals(ids, covered=True).tolist() == [survival(model, name, covered=True) for name in ids]


@pytest.mark.parametrize("tells", [True, False])
def test_drafts_of_one_confidence_are_judged_by_each_other(tells: bool) -> None:
    model = AcceptanceModel(max_window=W)
    model.tell(["sure", "unsure"], [3, 0] if tells else [])
    for _ in range(100):
        model.observe("sure", W, W)
        model.observe("unsure", W, 0)
    model.tell(["x", "y"], [3, 0] if tells else [])
    sure, unsure = (survival(model, name)[0] for name in ("x", "y"))
    assert survival(model, "z")[0] == pytest.approx(0.5, abs=0.05)
    assert (sure > 0.9 and unsure < 0.1) if tells else sure == unsure == survival(model, "z")[0]
    # A request that does what drafts of its confidence do is no better than others.
    model.tell(["sure"], [3] if tells else [])
    assert survival(model, "sure")[0] == pytest.approx(sure, abs=0.05) or not tells


def test_news_count_and_what_confidence_means_is_remembered_longer() -> None:
    model = AcceptanceModel(max_window=W)
    model.tell(["a"], [3])
    for _ in range(500):
        model.observe("a", W, W)
    model.limit(8)
    for _ in range(8):
        model.observe("b", W, 0)
    model.tell(["c"], [3])
    assert survival(model, "d")[0] < 0.7
    assert survival(model, "c")[0] > 0.9


# --- only the past ----------------------------------------------------------------------------------------------------


class Peeking(AcceptanceModel):
    """Wrong: looks into the engine, which has verified the round that the model is asked about."""

    engine: list[Verify]

    def survivals(self, request_ids: Sequence[str], *, covered: bool) -> Floats:
        ahead = learn(AcceptanceModel(max_window=self.max_window), self.engine[-1:])
        return ahead.survivals(request_ids, covered=covered)


def peek(engine: list[Verify]) -> AcceptanceModel:
    model = Peeking(max_window=W)
    model.engine = engine
    return model


def look_away(engine: list[Verify]) -> AcceptanceModel:
    return AcceptanceModel(max_window=W)


Maker = Callable[[list[Verify]], AcceptanceModel]


def predictions(make: Maker, history: list[Verify]) -> list[list[float]]:
    """What is said of each verify before it is observed; the engine knows its outcome already."""
    engine: list[Verify] = []
    model = make(engine)
    said = []
    for verify in history:
        engine.append(verify)
        said.append(survival(model, verify[0]))
        learn(model, [verify])
    return said


def check_only_past(make: Maker, history: list[Verify], last: tuple[Verify, Verify]) -> None:
    """Two histories that differ in the last outcome alone have the same predictions."""
    one, two = (predictions(make, [*history, end]) for end in last)
    assert one == two


@given(HISTORIES, REQUESTS, st.integers(0, W), st.integers(0, W))
def test_an_outcome_counts_only_after_it_was_observed(
    history: list[Verify], request: str, accepted: int, other: int
) -> None:
    last = ((request, W, W, accepted), (request, W, W, other))
    check_only_past(look_away, history, last)


def test_a_model_that_peeks_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_only_past(peek, [], (("a", W, W, 0), ("a", W, W, W)))


@given(HISTORIES)
def test_reading_changes_nothing(history: list[Verify]) -> None:
    read, unread = AcceptanceModel(max_window=W), AcceptanceModel(max_window=W)
    for verify in history:
        learn(read, [verify])
        _ = survival(read, "a"), survival(read, "zzz"), read.rate
    learn(unread, history)
    assert survival(read, "a") == survival(unread, "a")
    assert read.rate == unread.rate


# --- the truth --------------------------------------------------------------------------------------------------------


class Uncensored(AcceptanceModel):
    """Wrong: draft tokens behind the first rejected one count as rejected, each position on its own."""

    def observe(self, request_id: str, drafted: int, accepted: int, *, asked: int | None = None) -> None:
        for j in range(min(drafted, self.max_window)):
            self._acceptance._hits[0, j] += j < accepted
            self._acceptance._trials[0, j] += 1
        self._known = None


def error_after(
    model: AcceptanceModel, conditional: list[float], *, covered: float = 1.0, rounds: int = 6000, fixed: bool = False
) -> float:
    """Largest error of a new request's survival after simulated rounds, whose windows follow the last outcome."""
    coins = random.Random(5)
    window, size = 4, len(conditional)
    for n in range(rounds):
        drafted = 0
        while drafted < window and coins.random() < covered:
            drafted += 1
        accepted = 0
        while accepted < drafted and coins.random() < conditional[accepted]:
            accepted += 1
        model.observe(f"r{n % 8}", drafted, accepted, asked=window)
        window = 4 if fixed else min(size, accepted + 2)
    true = accumulate((a * covered for a in conditional), mul)
    return max(abs(a - b) for a, b in zip(survival(model, "new"), true, strict=True))


TRUTH = [0.8, 0.7, 0.9, 0.6]


@pytest.mark.parametrize("covered", [1.0, 0.7])
def test_estimates_find_the_truth_though_windows_follow_outcomes(covered: float) -> None:
    assert error_after(AcceptanceModel(max_window=4, memory=4000), TRUTH, covered=covered) < 0.04


def test_counting_what_was_never_looked_at_is_caught() -> None:
    assert error_after(AcceptanceModel(max_window=4, memory=4000), TRUTH, fixed=True) < 0.04
    assert error_after(Uncensored(max_window=4, memory=4000), TRUTH, fixed=True) > 0.15


def test_coverage_and_acceptance_may_depend_on_each_other() -> None:
    """A text drafter that proposes 4 good tokens or 1 bad one, half of the time each: P(drafted >= 2) is 1/2 and all of
    those are accepted, so a product of two marginals would be 1/2 * 1 * P(first accepted) = 1/4 where it is 1/2."""
    model = AcceptanceModel(max_window=4)
    for _ in range(2000):
        model.observe("a", 4, 4, asked=4)
        model.observe("a", 1, 0, asked=4)
    assert survival(model, "new") == pytest.approx([0.5] * 4, abs=0.02)
    assert survival(model, "new", covered=True) == pytest.approx([0.5] * 4, abs=0.02)


def test_a_request_moves_from_the_drafters_mean_to_its_own() -> None:
    model = AcceptanceModel(max_window=4)
    for n in range(400):
        model.observe(f"r{n % 10}", 4, 4 if n % 2 else 1)
    start = survival(model, "mine")
    assert start == survival(model, "another")
    believed = [start[1]]
    for _ in range(40):
        model.observe("mine", 4, 4)
        believed.append(survival(model, "mine")[1])
    assert believed == sorted(believed)
    assert believed[-1] > 0.9 > 0.7 > believed[0]
    assert survival(model, "another")[1] < 0.75, "a hard request is not taken for an easy one"
    model.forget("mine")
    assert survival(model, "mine") == survival(model, "another")
    model.forget("mine")


def test_a_request_that_does_as_the_drafter_does_stays_at_its_mean_with_any_window() -> None:
    """The first position is easier than the others; a request verified with window 1 is not easier for that."""
    coins, truth = random.Random(3), [0.9, 0.4, 0.4, 0.4]
    model = AcceptanceModel(max_window=4)
    for n in range(3000):
        window = 1 if n % 4 == 0 else 4
        accepted = 0
        while accepted < window and coins.random() < truth[accepted]:
            accepted += 1
        model.observe("short" if window == 1 else "long", window, accepted)
    for request in ("short", "long"):
        assert survival(model, request) == pytest.approx(survival(model, "new"), abs=0.06)


@given(HISTORIES, st.integers(1, W))
def test_success_never_lowers_and_failure_never_raises(history: list[Verify], drafted: int) -> None:
    for accepted, sign in ((drafted, 1), (0, -1)):
        model = learn(AcceptanceModel(max_window=W, memory=20), history)
        before = survival(model, "new", covered=True)
        model.observe("a", drafted, accepted)
        assert all(sign * (b - a) >= -1e-12 for a, b in zip(before, survival(model, "new", covered=True), strict=True))


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_the_prior_decays_with_position_and_unseen_positions_follow_seen_ones() -> None:
    model = AcceptanceModel(max_window=3, prior_rate=0.8, prior_decay=0.5)
    assert survival(model, "a") == pytest.approx([0.8, 0.8 * 0.4, 0.8 * 0.4 * 0.2])
    assert model.rate == 0.8
    for _ in range(500):
        model.observe("a", 1, 0)
    assert survival(model, "new")[0] < 0.05
    assert survival(model, "new")[1] < 0.05 * 0.05


@given(HISTORIES)
def test_no_draft_changes_nothing_but_coverage(history: list[Verify]) -> None:
    model = learn(AcceptanceModel(max_window=W), history)
    before, certain = survival(model, "a"), survival(model, "a", covered=True)
    model.observe("a", 0, 0)
    assert survival(model, "a") == before
    model.observe("a", 0, 0, asked=3)
    assert survival(model, "a", covered=True) == certain
    assert survival(model, "a")[0] < before[0]


def test_the_past_fades() -> None:
    model = AcceptanceModel(max_window=2, memory=50)
    for accepted in (0, 2):
        for _ in range(500):
            model.observe(f"r{accepted}", 2, accepted)
    assert survival(model, "new")[1] > 0.6
    assert model.rate > 0.8


def test_a_new_version_starts_between_what_was_seen_and_the_prior() -> None:
    untouched = survival(AcceptanceModel(max_window=2), "a")

    def after(weight: float) -> AcceptanceModel:
        model = AcceptanceModel(max_window=2)
        for _ in range(200):
            model.observe("a", 2, 0, asked=2)
            model.observe("a", 0, 0, asked=2)
        model.new_version(weight)
        return model

    believed = [survival(after(weight), "a")[0] for weight in (1, 0.1, 0.01, 0)]
    assert believed == sorted(believed)
    assert len(set(believed)) == 4
    assert survival(after(0), "a") == untouched
    model = after(0.1)
    for _ in range(200):
        model.observe("b", 2, 2, asked=2)
    assert survival(model, "new")[0] > 0.7, "new evidence outweighs old"


@pytest.mark.parametrize(
    ("drafted", "accepted", "asked"), [(2, 3, None), (2, -1, None), (-1, -1, None), (3, 1, 2), (0, 0, -1)]
)
def test_counts_that_cannot_be_are_refused(drafted: int, accepted: int, asked: int | None) -> None:
    with pytest.raises(AssertionError):
        AcceptanceModel(max_window=4).observe("a", drafted, accepted, asked=asked)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(AssertionError, match="use mode off"):
        AcceptanceModel(max_window=0)
    with pytest.raises(AssertionError):
        AcceptanceModel(max_window=2).new_version(2)
