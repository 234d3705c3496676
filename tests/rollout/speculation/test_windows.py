"""Windows equal brute force on costs of any shape; the drafter is changed for a gain and not for noise."""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product
from operator import mul

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.rollout.speculation.acceptance import AcceptanceModel
from specactor.rollout.speculation.windows import (
    Choice,
    best_windows,
    choose,
    padded,
)
from tests.rollout.speculation.world import survival

Survivals = list[list[float]]
PROBABILITY = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0]))  # ties and certainties too


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Survivals, list[float], list[float], int]:
    """(survivals, verify seconds by rows beyond B, draft seconds by depth, max_window): few requests, any costs."""
    max_window = draw(st.integers(0, 3))
    conditional = st.lists(PROBABILITY, max_size=3)
    survivals = [list(accumulate(c, mul)) for c in draw(st.lists(conditional, min_size=1, max_size=3))]
    verify = draw(st.lists(st.floats(0.5, 3), min_size=10, max_size=10))
    steps = draw(st.lists(st.floats(0, 1), min_size=4, max_size=4))
    return survivals, verify, list(accumulate(steps)), max_window


def speed_of(survivals: Survivals, windows: Sequence[int], verify: Sequence[float], draft: Sequence[float]) -> float:
    emitted = sum(1 + sum(s[:w]) for s, w in zip(survivals, windows, strict=True))
    return emitted / (verify[sum(windows)] + draft[max(windows)])


def by_brute_force(survivals: Survivals, verify: Sequence[float], draft: Sequence[float], max_window: int) -> float:
    ranges = [range(min(len(s), max_window) + 1) for s in survivals]
    return max(speed_of(survivals, windows, verify, draft) for windows in product(*ranges))


Chooser = Callable[[Survivals, Sequence[float], Sequence[float], int], tuple[int, ...]]


def shipped(survivals: Survivals, verify: Sequence[float], draft: Sequence[float], max_window: int) -> tuple[int, ...]:
    return chosen(survivals, verify, draft, max_window).windows


def chosen(survivals: Survivals, verify: Sequence[float], draft: Sequence[float], max_window: int) -> Choice:
    survival_BW, lengths = padded(survivals, max_window)
    return best_windows(survival_BW, lengths, verify_N1=np.array(verify), draft_s=draft.__getitem__)


def stops_early(
    survivals: Survivals, verify: Sequence[float], draft: Sequence[float], max_window: int
) -> tuple[int, ...]:
    """Wrong: adds the best row while it pays at once."""
    windows = [0] * len(survivals)
    while True:
        open_rows = [i for i, s in enumerate(survivals) if windows[i] < min(len(s), max_window)]
        if not open_rows:
            return tuple(windows)
        best = max(open_rows, key=lambda i: survivals[i][windows[i]])
        longer = [w + (i == best) for i, w in enumerate(windows)]
        if speed_of(survivals, longer, verify, draft) <= speed_of(survivals, windows, verify, draft):
            return tuple(windows)
        windows = longer


def ignores_depth(
    survivals: Survivals, verify: Sequence[float], draft: Sequence[float], max_window: int
) -> tuple[int, ...]:
    """Wrong: takes the rows of largest survival, however deep, and pays for the drafting afterwards."""
    rows = sorted((-s[j], j, i) for i, s in enumerate(survivals) for j in range(min(len(s), max_window)))
    options = [[sum(i == k for *_, i in rows[:n]) for k in range(len(survivals))] for n in range(len(rows) + 1)]
    return tuple(max(options, key=lambda windows: speed_of(survivals, windows, verify, draft)))


def check_best(
    choose_with: Chooser, survivals: Survivals, verify: Sequence[float], draft: Sequence[float], max_window: int
) -> None:
    windows = choose_with(survivals, verify, draft, max_window)
    assert len(windows) == len(survivals)
    assert all(0 <= w <= min(max_window, len(s)) for w, s in zip(windows, survivals, strict=True))
    best = by_brute_force(survivals, verify, draft, max_window)
    assert speed_of(survivals, windows, verify, draft) == pytest.approx(best, rel=1e-9)


@given(rounds())
def test_no_windows_are_predicted_faster(case: tuple[Survivals, list[float], list[float], int]) -> None:
    check_best(shipped, *case)


@given(rounds(), st.floats(0, 3), st.floats(0, 0.2))
def test_nor_with_a_jump_between_one_and_two_tokens(
    case: tuple[Survivals, list[float], list[float], int], jump: float, slope: float
) -> None:
    survivals, _, draft, max_window = case
    verify = [1 + (jump if extra else 0) + slope * extra for extra in range(10)]
    check_best(shipped, survivals, verify, draft, max_window)
    free = [0.0] * 4
    check_best(shipped, survivals, verify, free, max_window)


def speed_with_drafts(
    survivals: Survivals,
    windows: Sequence[int],
    verify: Sequence[float],
    draft: Sequence[float],
    drafted: Sequence[bool],
) -> float:
    emitted = sum(1 + sum(s[:w]) for s, w in zip(survivals, windows, strict=True))
    depth = max((w for w, there in zip(windows, drafted, strict=True) if not there), default=0)
    return emitted / (verify[sum(windows)] + draft[depth])


def with_drafts(case: tuple[Survivals, list[float], list[float], int], drafted: Sequence[bool]) -> tuple[float, float]:
    """(speed of the windows, that of the best ones by brute force), where these requests have drafts already."""
    survivals, verify, draft, max_window = case
    survival_BW, lengths = padded(survivals, max_window)
    verify_N1 = np.array(verify)
    found = best_windows(survival_BW, lengths, verify_N1=verify_N1, draft_s=draft.__getitem__, drafted=drafted)
    ranges = [range(min(len(s), max_window) + 1) for s in survivals]
    best = max(speed_with_drafts(survivals, windows, verify, draft, drafted) for windows in product(*ranges))
    assert found.tokens_per_s == pytest.approx(speed_with_drafts(survivals, found.windows, verify, draft, drafted))
    return found.tokens_per_s, best


@given(rounds(), st.lists(st.booleans(), min_size=3, max_size=3))
def test_nor_where_some_requests_have_their_drafts(
    case: tuple[Survivals, list[float], list[float], int], drafted: list[bool]
) -> None:
    speed, best = with_drafts(case, drafted[: len(case[0])])
    assert speed == pytest.approx(best, rel=1e-9)


def test_the_depth_of_drafts_that_are_there_costs_nothing() -> None:
    survivals, verify = [[0.9, 0.9, 0.9], [0.9, 0.1, 0.1]], [1.0 + 0.1 * rows for rows in range(7)]
    draft = [0.0, 0.1, 2.0, 4.0]
    survival_BW, lengths = padded(survivals, 3)
    verify_N1, draft_s = np.array(verify), draft.__getitem__
    assert best_windows(survival_BW, lengths, verify_N1=verify_N1, draft_s=draft_s).windows == (1, 1)
    drafted = [True, False]
    assert best_windows(survival_BW, lengths, verify_N1=verify_N1, draft_s=draft_s, drafted=drafted).windows == (3, 1)


JUMP = ([[0.9, 0.8, 0.7]], [1.0, 2.5, 2.6, 2.65], [0.0] * 4, 3)
"""One draft token makes 1.9 / 2.5 tokens/s of 1, three make 3.4 / 2.65."""
DEEP = ([[1.0, 1.0, 1.0], [0.9, 0.0, 0.0]], [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6], [0.0, 0.1, 2.0, 4.0], 3)
"""One request could go deep for little, but the drafter is slow: both to depth 1 is best."""


@pytest.mark.parametrize(("wrong", "case"), [(stops_early, JUMP), (ignores_depth, DEEP)])
def test_wrong_choosers_are_caught(
    wrong: Chooser, case: tuple[Survivals, Sequence[float], Sequence[float], int]
) -> None:
    check_best(shipped, *case)
    with pytest.raises(AssertionError):
        check_best(wrong, *case)


@given(rounds())
def test_what_is_predicted_is_what_the_windows_give(case: tuple[Survivals, list[float], list[float], int]) -> None:
    survivals, verify, draft, max_window = case
    choice = chosen(*case)
    assert choice.tokens_per_s == pytest.approx(speed_of(survivals, choice.windows, verify, draft))
    assert choice.round_s == pytest.approx(verify[sum(choice.windows)] + draft[max(choice.windows)])
    largest = tuple(min(max_window, len(s)) for s in survivals)
    assert speed_of(survivals, largest, verify, draft) <= choice.tokens_per_s * (1 + 1e-9)
    assert chosen(*case) == choice


@given(rounds(), st.floats(0, 1))
def test_more_acceptance_never_lowers_the_predicted_speed(
    case: tuple[Survivals, list[float], list[float], int], share: float
) -> None:
    survivals, verify, draft, max_window = case
    better = [list(accumulate((x + share * (1 - x) for x in s), min)) for s in survivals]  # rounding may make it rise
    faster = chosen(better, verify, draft, max_window).tokens_per_s
    assert faster >= chosen(*case).tokens_per_s * (1 - 1e-9)


def test_drafting_that_gets_cheaper_with_depth_is_priced_at_its_maximum() -> None:
    choice = chosen([[0.9, 0.8]], [1.0, 1.0, 1.0], [0.0, 0.5, 0.1], 2)
    assert choice.windows == (2,)
    assert choice.round_s == 1.5


def test_among_equals_the_fewest_rows_and_the_first_requests() -> None:
    assert shipped([[0.0, 0.0]], [1.0] * 3, [0.0] * 3, 2) == (0,)
    assert shipped([[0.5, 0.5]] * 3, [1.0, 1.1, 1.2, *[9.0] * 9], [0.0] * 3, 2) == (1, 1, 0)
    many = [[(1.0, 0.5)[i % 3 > 0]] * 3 for i in range(64)]
    in_order = sorted((-s[j], j, i) for i, s in enumerate(many) for j in range(3))
    cheap = 100
    expected = tuple(sum(i == k for *_, i in in_order[:cheap]) for k in range(64))
    assert shipped(many, [1.0] * (cheap + 1) + [9.0] * 200, [0.0] * 4, 3) == expected


def test_survivals_from_the_model_fit() -> None:
    model = AcceptanceModel(max_window=8)
    for _ in range(50):
        model.observe("easy", 8, 8, asked=8)
        model.observe("hard", 8, 0, asked=8)
    survivals = [survival(model, request) for request in ("easy", "new", "hard")]
    choice = best_windows(
        np.array(survivals),
        [8] * 3,
        verify_N1=0.003 + 0.0004 * np.arange(3, 28),
        draft_s=lambda depth: 0.0001 * depth,
    )
    assert all(a >= b for a, b in pairwise(choice.windows)), "the easier, the more"
    assert choice.windows[0] == 8
    assert choice.windows[-1] <= 1


@pytest.mark.parametrize("bad", [[0.5, 0.6], [1.5, 0.5], [0.5, -0.1], [0.5, float("nan")], [float("nan"), 0.5]])
def test_survivals_that_cannot_be_are_refused(bad: list[float]) -> None:
    for survivals in ([bad], [[0.9, 0.8], bad], [bad, [0.5]]):
        with pytest.raises(AssertionError):
            shipped(survivals, [1.0] * 9, [0.0] * 3, 2)


def test_costs_that_cannot_be_are_refused() -> None:
    with pytest.raises(AssertionError):
        shipped([], [1.0], [0.0], 2)
    with pytest.raises(AssertionError):
        shipped([[0.5]], [1.0, 0.0], [0.0] * 2, 1)
    with pytest.raises(AssertionError):
        shipped([[0.5]], [1.0, 1.0], [0.0, -1.0], 1)


# --- which drafter ----------------------------------------------------------------------------------------------------


def option(tokens_per_s: float, factor: float = 1.0) -> Choice:
    return Choice(windows=(2, 1), emitted=4.0, round_s=4.0 / tokens_per_s).corrected(factor)


def drafter(options: dict[str, Choice], current: str = "off", margin: float = 0.02) -> str:
    """Plain decoding makes 100 tokens/s."""
    return choose(options, requests=2, plain_s=0.02, current=current, margin=margin).drafter


def test_the_fastest_is_chosen_and_the_reason_tells_all() -> None:
    fast = choose({"ngram": option(110), "suffix": option(498)}, requests=2, plain_s=2 / 512)
    assert (fast.drafter, fast.windows, fast.reason) == ("off", (0, 0), "off: 512 tok/s; suffix 498; ngram 110")
    slow = choose({"ngram": option(110), "suffix": option(498)}, requests=2, plain_s=2 / 100)
    assert (slow.drafter, slow.windows, slow.reason) == ("suffix", (2, 1), "suffix: 498 tok/s; ngram 110; off 100")
    assert choose({}, requests=2, plain_s=0.5).reason == "off: 4 tok/s"


def test_a_tie_is_off_then_the_first_name() -> None:
    assert drafter({"suffix": option(100)}, current="gone") == "off"
    assert drafter({"suffix": option(100)}, margin=0) == "off"
    assert drafter({"b": option(200), "a": option(200)}) == "a"


@pytest.mark.parametrize(
    ("speed", "current", "expected"),
    [(101, "off", "off"), (103, "off", "suffix"), (101, "suffix", "suffix"), (99, "suffix", "off"), (97, "x", "off")],
)
def test_drafting_begins_above_the_margin_and_ends_where_it_does_not_pay(
    speed: float, current: str, expected: str
) -> None:
    assert drafter({"suffix": option(speed)}, current=current) == expected


@pytest.mark.parametrize(("speed", "expected"), [(203, "suffix"), (205, "b"), (199, "suffix")])
def test_the_current_drafter_is_kept_for_less_than_the_margin(speed: float, expected: str) -> None:
    assert drafter({"suffix": option(200), "b": option(speed)}, current="suffix") == expected


@given(st.lists(st.floats(98.1, 101.9), min_size=2, max_size=20))
def test_noise_within_the_margin_never_switches(speeds: list[float]) -> None:
    current = "off"
    for speed in speeds:
        current = drafter({"suffix": option(speed)}, current=current)
        assert current == "off"


@given(st.dictionaries(st.sampled_from("abc"), st.floats(1, 1000)), st.sampled_from(["off", "a", "gone"]))
def test_no_choice_loses_more_than_the_margin(speeds: dict[str, float], current: str) -> None:
    picked = choose({n: option(s) for n, s in speeds.items()}, requests=2, plain_s=0.02, current=current)
    assert picked.tokens_per_s * 1.02 >= max([100.0, *speeds.values()]) * (1 - 1e-9)
    assert picked.tokens_per_s == pytest.approx({**speeds, "off": 100.0}[picked.drafter])


def test_a_correction_scales_a_drafters_rounds() -> None:
    slow = choose({"suffix": option(150, factor=2.0)}, requests=2, plain_s=0.02)
    assert slow.drafter == "off"
    fast = choose({"suffix": option(150, factor=0.5)}, requests=2, plain_s=0.02)
    assert fast.drafter == "suffix"
    assert fast.tokens_per_s == pytest.approx(300)


def test_choices_that_cannot_be_are_refused() -> None:
    with pytest.raises(AssertionError, match="plain decoding"):
        drafter({"off": option(1)})
    with pytest.raises(AssertionError, match="suffix"):
        choose({"suffix": option(100)}, requests=3, plain_s=0.02)
    with pytest.raises(AssertionError):
        choose({}, requests=1, plain_s=0)
    assert replace(option(100), factor=2.0).factor == 2.0


def test_a_decision_takes_a_small_part_of_a_decode_step() -> None:
    """64 requests, windows up to 8: about 0.25 ms where it was measured; the bound leaves room for a busy machine."""
    model = AcceptanceModel(max_window=8)
    requests = [f"r{i}" for i in range(64)]
    for i, request in enumerate(requests):
        model.observe(request, 8, i % 9, asked=8)
    verify_N1 = 0.003 + 2e-5 * np.arange(64, 64 * 9 + 1)

    def decide() -> None:
        survival_BW = model.survivals(requests, covered=False)
        best_windows(survival_BW, [8] * 64, verify_N1=verify_N1, draft_s=lambda depth: 1e-4 * depth)

    assert min(timeit.repeat(decide, timer=time.process_time, number=20, repeat=10)) / 20 < 1.5e-3
