"""Unequal devices and links on a clock: what is played knows them, and so does the choice by costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import clocked, paced_unequal
from benchmarks.paced_devices import Setting, flat
from benchmarks.paced_unequal import COLUMNS, FIRST, LAST, OWN, believed, cell, cells, chosen
from benchmarks.results import stored
from specactor.rollout.speculation.costs import Grid

EQUAL = Setting(name="a quarter", pace=flat(0.080, 0.020), batch=8, tokens=48)


def test_groups_that_are_alike_play_as_equal_groups() -> None:
    alike = replace(EQUAL, paces=(EQUAL.pace, EQUAL.pace))
    assert clocked.decoupled(alike, runner_up=0.5) == clocked.decoupled(EQUAL, runner_up=0.5)
    assert clocked.coupled(alike) == clocked.coupled(EQUAL)


def test_the_slowest_group_counts_and_the_last_one_drafts() -> None:
    slow = flat(0.160, 0.040)
    mixed = replace(EQUAL, paces=(EQUAL.pace, slow))
    assert clocked.off_s(mixed) == pytest.approx(47 * (0.160 + clocked.HOST_S))
    assert clocked.coupled(mixed).over_off == pytest.approx(clocked.coupled(EQUAL).over_off, rel=0.15)
    fast_verifies = clocked.decoupled(mixed, runner_up=0.0).over_off
    slow_verifies = clocked.decoupled(replace(mixed, paces=(slow, EQUAL.pace)), runner_up=0.0).over_off
    assert fast_verifies > 1.2 * slow_verifies


def test_a_drafter_of_its_own_leaves_all_groups_to_verify() -> None:
    slow_steps = Grid(requests=(1.0,), per_request=(1.0,), seconds=((0.070,),))
    own = replace(EQUAL, drafter=EQUAL.pace.draft)
    assert (own.verifiers, EQUAL.verifiers) == (2, 1)
    as_fast = clocked.decoupled(own, runner_up=0.5).over_off
    assert as_fast >= 0.97 * clocked.decoupled(EQUAL, runner_up=0.5).over_off
    assert clocked.decoupled(replace(own, drafter=slow_steps), runner_up=0.5).over_off < 0.8 * as_fast


def test_a_slow_link_costs_drafts() -> None:
    empty = [clocked.decoupled(replace(EQUAL, link_s=link_s), runner_up=0.5).empty for link_s in (0.0, 0.040, 0.200)]
    assert empty[0] < empty[1] < empty[2]


def test_the_choice_knows_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: a search that is told of no delay drafts behind any link."""
    near, far = (cell("", ("H100", "H100"), "Qwen2.5-1.5B", 8, link_ms, own=False) for link_ms in (0.1, 10.0))
    assert chosen(believed(near)) == FIRST
    assert chosen(believed(far)) == "coupled"
    assert believed(near)["coupled"] == believed(far)["coupled"]
    monkeypatch.setattr(paced_unequal, "message_s", lambda setting: 0.0)
    assert chosen(believed(far)) == FIRST


def test_the_choice_knows_which_device_is_slower() -> None:
    beliefs = believed(cell("", ("H200", "H100"), "Qwen2.5-1.5B", 8, 0.1, own=True))
    assert beliefs[FIRST] > beliefs[LAST] > 1.0
    assert beliefs[FIRST] > beliefs[OWN], "an L20 takes longer for a step than H200s for a pass"


def test_every_setting_is_another() -> None:
    """Wrong was: the same groups once with a device on top and once without, for which all else is alike."""
    found = cells()
    assert len({repr((of.setting.paces, *paced_unequal.named(of)[1:])) for of in found}) == len(found) == 24


def test_the_verdict_says_how_wrong_beliefs_are() -> None:
    def found(choice: str, believed: str) -> list[str]:
        row = dict.fromkeys(COLUMNS, "1") | {"coupled": "1.50", FIRST: "2.00", "best in hindsight": FIRST}
        return list((row | {"chosen by costs": choice, "believed": believed}).values())

    rows = [found("coupled", "2.10"), found(FIRST, "1.90"), found("off", "1.00")]
    assert "is off by -5 to +40 % (median +0 %)." in paced_unequal.verdict(rows)


def test_stored_choices_are_those_of_today() -> None:
    """The page is made again where costs, the search or the settings change."""
    rows = stored("paced_unequal")
    assert len(rows) == len(cells())
    for row, of in zip(rows, cells(), strict=True):
        beliefs = believed(of)
        assert row["chosen by costs"] == chosen(beliefs), "run python -m benchmarks.paced_unequal"
        assert row["believed"] == f"{beliefs[chosen(beliefs)]:.2f}"
