"""Advantages against statistics and numpy, by hand, by properties, and with wrong versions that the checks catch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specactor.errors import DataError
from specactor.trainer.advantages import STD_EPS, AdvantageKind, group_advantages, informative, shape_overlong

KINDS: tuple[AdvantageKind, ...] = ("grpo", "dr_grpo", "rloo", "reinforce_pp")
Advantages = Callable[[list[list[float]], AdvantageKind], list[list[float]]]

REWARD = st.integers(-20, 20).map(lambda n: n / 8)  # exact in binary, so that sums and shifts are exact too
GROUPS = st.lists(st.lists(REWARD, min_size=2, max_size=6), min_size=1, max_size=5)
ANY_GROUPS = st.lists(st.lists(st.floats(-10, 10), min_size=2, max_size=6), min_size=1, max_size=5)


def reference(groups: list[list[float]], kind: AdvantageKind) -> list[list[float]]:
    """Straight from the papers, response by response, with the standard library's statistics."""
    baseline = []
    for group in groups:
        for i, r in enumerate(group):
            others = group[:i] + group[i + 1 :]
            baseline.append(r - statistics.fmean(others if kind == "rloo" else group))
    out, k = [], 0
    for group in groups:
        row = []
        for _ in group:
            if kind == "grpo":
                row.append(baseline[k] / (statistics.stdev(group) + STD_EPS))
            elif kind == "reinforce_pp":
                row.append((baseline[k] - statistics.fmean(baseline)) / (statistics.stdev(baseline) + STD_EPS))
            else:
                row.append(baseline[k])
            k += 1
        out.append(row)
    return out


def check_against_reference(compute: Advantages, kind: AdvantageKind) -> None:
    rng = np.random.default_rng(7)
    for _ in range(20):
        groups = [rng.normal(1.0, 2.0, size=rng.integers(2, 9)).tolist() for _ in range(int(rng.integers(1, 5)))]
        got, want = compute(groups, kind), reference(groups, kind)
        assert [len(row) for row in got] == [len(row) for row in groups]
        np.testing.assert_allclose(np.concatenate(got), np.concatenate(want), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_papers(kind: AdvantageKind) -> None:
    check_against_reference(group_advantages, kind)


def test_by_hand() -> None:
    groups = [[1.0, 0.0, 0.0, 0.0], [1.0, 3.0]]
    assert group_advantages(groups, "dr_grpo") == [[0.75, -0.25, -0.25, -0.25], [-1.0, 1.0]]
    assert group_advantages(groups, "rloo") == [
        pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3]),
        pytest.approx([-2.0, 2.0]),
    ]
    # sample standard deviations: sqrt((0.75^2 + 3 * 0.25^2) / 3) = 0.5 and sqrt(2); of all six: sqrt(2.75 / 5)
    assert group_advantages(groups, "grpo") == [
        pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5),
        pytest.approx([-1 / math.sqrt(2), 1 / math.sqrt(2)], rel=1e-5),
    ]
    assert group_advantages(groups, "reinforce_pp")[1] == pytest.approx(
        [-1 / math.sqrt(0.55), 1 / math.sqrt(0.55)], rel=1e-5
    )


def _population_std(groups: list[list[float]], kind: AdvantageKind) -> list[list[float]]:
    return [((np.array(g) - np.mean(g)) / (np.std(g) + STD_EPS)).tolist() for g in groups]


def _including_itself(groups: list[list[float]], kind: AdvantageKind) -> list[list[float]]:
    return [[r - sum(g) / len(g) for r in g] for g in groups]


def _std_of_raw_rewards(groups: list[list[float]], kind: AdvantageKind) -> list[list[float]]:
    std = statistics.stdev([r for g in groups for r in g])
    return [[(r - statistics.fmean(g)) / (std + STD_EPS) for r in g] for g in groups]


def _batch_mean_as_baseline(groups: list[list[float]], kind: AdvantageKind) -> list[list[float]]:
    mean = statistics.fmean(r for g in groups for r in g)
    return [[r - mean for r in g] for g in groups]


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (_population_std, "grpo"),
        (_including_itself, "rloo"),
        (_std_of_raw_rewards, "reinforce_pp"),
        (_batch_mean_as_baseline, "dr_grpo"),
    ],
)
def test_a_wrong_version_is_caught(wrong: Advantages, kind: AdvantageKind) -> None:
    with pytest.raises(AssertionError):
        check_against_reference(wrong, kind)


@given(groups=GROUPS, kind=st.sampled_from(KINDS))
def test_every_group_sums_to_zero(groups: list[list[float]], kind: AdvantageKind) -> None:
    for row in group_advantages(groups, kind):
        assert math.fsum(row) == pytest.approx(0.0, abs=1e-9)


@given(groups=GROUPS, kind=st.sampled_from(KINDS), shift=REWARD)
def test_a_shift_of_one_group_changes_nothing(groups: list[list[float]], kind: AdvantageKind, shift: float) -> None:
    shifted = [[r + shift for r in groups[0]], *groups[1:]]
    for got, want in zip(group_advantages(shifted, kind), group_advantages(groups, kind), strict=True):
        assert got == pytest.approx(want, rel=1e-7, abs=1e-9)


@given(groups=ANY_GROUPS, kind=st.sampled_from(KINDS), data=st.data())
def test_permuting_permutes_exactly(groups: list[list[float]], kind: AdvantageKind, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(groups))))
    inner = [data.draw(st.permutations(range(len(group)))) for group in groups]
    permuted = [[groups[g][i] for i in inner[g]] for g in order]
    want = group_advantages(groups, kind)
    assert group_advantages(permuted, kind) == [[want[g][i] for i in inner[g]] for g in order]


@given(groups=GROUPS, scale=st.sampled_from([2.0, 4.0, 0.5]))
def test_grpo_is_blind_to_the_scale_of_a_group_and_dr_grpo_is_not(groups: list[list[float]], scale: float) -> None:
    scaled = [[r * scale for r in group] for group in groups]
    for got, want in zip(group_advantages(scaled, "grpo"), group_advantages(groups, "grpo"), strict=True):
        assert got == pytest.approx(want, rel=1e-3)
    want_dr = [[a * scale for a in row] for row in group_advantages(groups, "dr_grpo")]
    assert group_advantages(scaled, "dr_grpo") == want_dr


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_give_exact_zeros(kind: AdvantageKind) -> None:
    assert group_advantages([[0.1] * 3, [0.7] * 7], kind) == [[0.0] * 3, [0.0] * 7]
    assert group_advantages([], kind) == []


@pytest.mark.parametrize("kind", KINDS)
def test_unusable_groups_are_named(kind: AdvantageKind) -> None:
    with pytest.raises(DataError, match="group 1: got 1 responses, expected >= 2"):
        group_advantages([[1.0, 0.0], [1.0]], kind)


def test_informative() -> None:
    assert informative([0.0, 1.0, 0.0])
    assert not informative([1.0, 1.0, 1.0])
    assert not informative([])


@pytest.mark.parametrize(
    ("length", "lost"), [(1, 0.0), (60, 0.0), (61, 0.05), (70, 0.5), (79, 0.95), (80, 1.0), (90, 1.0)]
)
def test_overlong_responses_lose_linearly(length: int, lost: float) -> None:
    assert shape_overlong(1.0, length, 80, 20) == pytest.approx(1.0 - lost)
    assert shape_overlong(-1.0, length, 80, 20) == pytest.approx(-1.0 - lost)
    assert shape_overlong(1.0, length, 80, 0) == 1.0
