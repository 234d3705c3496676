"""Drafters of dialled acceptance are right as often as they are told, and wrong from there on."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from benchmarks.dialled import SCRIPT, Elsewhere, InEngine, Script, Text
from specactor.rollout.decoupled.drafter_side import Lane
from specactor.rollout.speculation.drafter import DraftSequence

RIGHT = [i * 7 % 13 for i in range(2000)]


def script(acceptance: float, step_s: float = 0.0) -> Script:
    return Script(acceptance=acceptance, step_s=[step_s, 2 * step_s], outputs={"5": RIGHT})


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.9, 1.0])
def test_acceptance_is_as_dialled(acceptance: float) -> None:
    drafter = script(acceptance)
    hits = [
        drafter.next_token(5, position, RIGHT[position - 1]) == RIGHT[position] for position in range(1, len(RIGHT))
    ]
    assert sum(hits) / len(hits) == pytest.approx(acceptance, abs=0.03)


def test_the_rate_is_that_of_the_coins() -> None:
    few = Script(acceptance=0.5, step_s=[0.0], outputs={"5": RIGHT[:40]})
    hits = [few.next_token(5, position, RIGHT[position - 1]) == RIGHT[position] for position in range(1, 40)]
    assert few.rate() == sum(hits) / len(hits) != 0.5
    assert script(0.6).rate() == pytest.approx(0.6, abs=0.03)


def test_after_a_wrong_token_nothing_is_right() -> None:
    drafter = script(1.0)
    assert drafter.next_token(5, 10, RIGHT[9]) == RIGHT[10]
    assert drafter.next_token(5, 10, RIGHT[9] + 1) != RIGHT[10]
    assert drafter.next_token(5, len(RIGHT), RIGHT[-1]) == 0


def test_both_draft_the_same() -> None:
    within, elsewhere = object.__new__(InEngine), object.__new__(Elsewhere)
    within._script = elsewhere._script = script(0.7)
    for start in range(1, 40):
        [draft] = within.propose(
            [DraftSequence(request_id="a", prompt_ids=(1,), output_ids=RIGHT[:start], seed=5)], [4]
        )
        tokens = RIGHT[:start]
        for _ in range(4):
            lane = Lane(key="a", prompt_ids=(1,), tokens=tokens, seed=5, temperature=1.0, agreed=0)
            tokens = [*tokens, *elsewhere.extend([lane])[0]]
        assert draft == tokens[start:]


@pytest.mark.parametrize("window", [1, 4, 9])
def test_drafts_are_looked_up_as_they_are_chosen_one_by_one(window: int) -> None:
    """After right and wrong tokens, and over the end; a plan of other coins differs."""
    known, tokens = script(0.6), RIGHT[:60]
    known = msgspec.structs.replace(known, outputs={"5": tokens})
    plan, other = known.plan(5), msgspec.structs.replace(known, coins="other").plan(5)
    differ = 0
    for start in range(1, 66):
        for last in (0, 1):
            output = [*tokens, *[3] * 10][:start]
            output[-1] += last
            path = [*output]
            for _ in range(window):
                path.append(known.next_token(5, len(path), path[-1]))
            assert plan.draft(output, window) == path[start:]
            differ += other.draft(output, window) != path[start:]
    assert differ > 0


def test_over_text_others_are_right_than_those_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Script(acceptance=0.7, text=0.5, text_spread=0.0, step_s=[9.0], outputs={"5": RIGHT})
    (tmp_path / "script.json").write_bytes(msgspec.json.encode(known))
    monkeypatch.setenv(SCRIPT, str(tmp_path / "script.json"))
    text = Text()
    both = [
        (
            text.propose([DraftSequence(request_id="a", prompt_ids=(1,), output_ids=RIGHT[:at], seed=5)], [1])[0][0],
            known.next_token(5, at, RIGHT[at - 1]),
        )
        for at in range(1, len(RIGHT))
    ]
    right = [(drafted == RIGHT[at], model == RIGHT[at]) for at, (drafted, model) in enumerate(both, 1)]
    assert sum(of for of, _ in right) / len(right) == pytest.approx(0.5, abs=0.05)
    assert sum(a and b for a, b in right) / len(right) == pytest.approx(0.35, abs=0.05), "they err independently"


def test_a_step_takes_its_time() -> None:
    began = time.perf_counter()
    script(1.0, step_s=0.02).spend(4)  # twice as much as two requests
    assert time.perf_counter() - began >= 0.08


@pytest.mark.parametrize("runner_up", [0.0, 0.5])
def test_a_drafter_without_second_choices_tells_none(runner_up: float) -> None:
    """Whatever is told is drafted on from."""
    drafter = object.__new__(Elsewhere)
    drafter._script = msgspec.structs.replace(script(0.7), runner_up=runner_up)
    drafter.extend([Lane(key="a", prompt_ids=(1,), tokens=RIGHT[:5], seed=5, temperature=1.0, agreed=0)])
    [told] = drafter.runners_up()
    assert (told is None) == (runner_up == 0.0)
