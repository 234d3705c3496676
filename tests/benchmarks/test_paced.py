"""Paced engines and drafters take the time of the devices that they imitate, and the page says what that gave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from benchmarks import clocked, paced, paced_devices, paced_prediction
from benchmarks.dialled import Script
from benchmarks.paced_devices import DisturbedError, Setting, flat, published, script_of, shortened, started
from benchmarks.paced_engine import DevicePace, size
from benchmarks.results import stored
from specactor.config import SpeculationConfig
from specactor.planning.plans import Pace, running
from specactor.rollout.speculation.costs import Grid

PASS_S, STEP_S = 0.1, 0.02
SETTING = Setting(name="small", pace=flat(PASS_S, STEP_S), batch=2, tokens=16)


def test_a_pace_is_the_roofline_times_the_dilation() -> None:
    pace = published("Qwen2.5-32B", "Qwen2.5-0.5B", "H100", devices=4, context=4096, most=16, dilation=10.0)
    assert pace.pass_s(8, 8) == 10.0 * pace.plain.at(8, 1)
    assert pace.pass_s(8, 20) == 10.0 * pace.verify.at(8, 2.5)
    assert 0.05 < pace.pass_s(8, 8) < 0.1  # 64 GB of weights at 4 x 2.8 TB/s, and keys
    assert pace.step_s(16)[0] < 0.1 * pace.pass_s(1, 1)
    assert msgspec.json.decode(msgspec.json.encode(pace), type=DevicePace) == pace


def test_a_verification_is_paced_by_its_requests_and_rows() -> None:
    """Wrong was: every row a request of its own, which reads its own keys."""
    assert size(["a", "b"]) == (2, 2)
    names = [name for name in map(str, range(64)) for _ in range(4)]
    assert size(names) == (64, 256)
    pace = published("Qwen2.5-32B", "Qwen2.5-1.5B", "H100", devices=8, context=1024, most=64, dilation=1.0)
    assert pace.pass_s(*size(names)) < 0.8 * pace.pass_s(256, 256)


def test_second_choices_are_right_as_often_as_dialled() -> None:
    right = [i * 7 % 13 for i in range(4000)]
    script = Script(acceptance=0.7, runner_up=0.5, step_s=[0.0], outputs={"5": right})
    both = [script.choices(5, at, right[at - 1]) for at in range(1, len(right))]
    missed = [second == right[at] for at, (first, second) in enumerate(both, 1) if first != right[at]]
    assert sum(missed) / len(missed) == pytest.approx(0.5, abs=0.05)
    assert all(first != second for first, second in both)


def test_acceptance_is_spread_over_requests() -> None:
    right = [i * 7 % 13 for i in range(3000)]
    rates = [Script(acceptance=0.7, spread=0.2, step_s=[0.0], outputs={str(seed): right}).rate() for seed in range(30)]
    assert sum(rates) / len(rates) == pytest.approx(0.7, abs=0.06)
    assert min(rates) < 0.6
    assert max(rates) > 0.8


def test_with_a_tail_few_requests_are_long() -> None:
    lengths = [
        r.sampling.max_new_tokens
        for r in paced_devices.requests(replace(SETTING, batch=256, tail=True, tokens=400), batch=0)
    ]
    assert max(lengths) <= 400
    assert sorted(lengths)[128] < 150 < sorted(lengths)[-8]


def test_the_page_names_who_wins() -> None:
    def row(setting: str, name: str, ratio: str) -> list[str]:
        return [setting, name, ratio, *["0"] * 7]

    rows = [
        row(setting, name, ratio)
        for setting, *ratios in (("one", "1.5", "2.0", "1.6"), ("other", "1.4", "1.2", "1.2"))
        for name, ratio in zip(paced.CONTESTANTS, ratios, strict=False)
    ]
    said = paced.verdict(rows)
    assert "in 1 of 2 settings" in said
    assert "2.00 beside 1.50 times plain decoding (one)" in said
    assert "1.00 to 1.25 times" in said
    assert "text" not in said, "nothing of it was measured"
    more = [
        row("one", name, ratio)
        for name, ratio in zip((paced.AUTO, paced.AUTO_COUPLED, paced.FASTEST), ("1.6", "1.2", "2.4"), strict=True)
    ]
    said = paced.verdict([*rows[:3], *more])
    assert "decoupled drafting has 1.60 to 1.60, coupled drafting 1.20 to 1.20" in said
    assert "are 1.50 to 1.50 times as fast" in said


def test_predictions_are_what_the_formulas_give_without_ends() -> None:
    """Long requests of equal acceptance: a pass of four draft steps, the first choice right with .8."""
    setting = Setting(name="a quarter", pace=flat(0.080, 0.020), batch=8, tokens=4000)
    predicted = paced_prediction.over_off(setting)
    survival = [0.8**j for j in range(1, 4)]
    coupled = (1 + sum(survival)) / (1 + 3 / 4)
    assert predicted["off"] == 1.0
    assert predicted["coupled"] == pytest.approx(coupled, rel=0.03)
    slowest = Pace(requests=8, round_s=setting.pace.verify, token_s=0.020, message_s=1e-3, most=16)
    ahead = running([0.8**j for j in range(1, 10)], 8, slowest)
    assert predicted["decoupled"] == pytest.approx(ahead.tokens, rel=0.05)
    assert ahead.ready < 0.7, "rounds take what is there"
    slow = replace(setting, pace=flat(0.080, 0.040))
    assert paced_prediction.over_off(slow)["coupled"] < 0.8 * predicted["coupled"], "the table is what counts"


def test_predictions_know_drafts_that_are_always_right() -> None:
    """Some requests, too, if acceptance is spread around nearly 1."""
    always = Setting(name="always", pace=flat(0.080, 0.020), batch=8, tokens=400, acceptance=1.0)
    predicted = paced_prediction.over_off(always)
    assert predicted["coupled"] == pytest.approx((1 + 8) / (1 + 8 / 4), rel=0.03)
    assert predicted["decoupled"] == pytest.approx(4.0, rel=0.03), "as many as are drafted in a pass"
    spread = paced_prediction.over_off(replace(always, acceptance=0.97, spread=0.05))
    assert 1.0 < spread["coupled"] < predicted["coupled"]


def test_errors_of_predictions_are_said_by_contestant() -> None:
    rows = [["s", "off", "1.00", "1.00"], ["s", "coupled", "2.00", "2.10"], ["s", "decoupled", "1.00", "0.80"]]
    said = paced_prediction.errors([*rows, ["s", "decoupled, first choices alone", "1.00", "1.10"]], 2, 3)
    assert "3 cells: 10 %" in said
    assert "coupled 5 % (+5 to +5)" in said
    assert "first choices 10 %" in said
    assert "does not know 20 % (-20 to -20)" in said


def test_a_page_without_new_runs_keeps_what_was_measured() -> None:
    known = stored("paced")
    made, turns = paced.run([], repetitions=9)
    measured = [[row[made.columns.index(name)] for name in (*paced.MEASURED, *paced.WHEN)] for row in made.rows]
    assert measured == [[row[name] for name in (*paced.MEASURED, *paced.WHEN)] for row in known]
    assert made.summary is not None
    columns, rows = made.summary
    shown = {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
    for row in known:
        if row["contestant"] != "off":
            assert shown[row["setting"]][row["contestant"]] == row["tokens/s over off"]
    there = (paced.RESULTS / "paced_turns.csv").exists()
    assert turns == ([list(row.values()) for row in stored("paced_turns")] if there else [])
    assert measured, "there is a page"
    page = (paced.RESULTS / "paced.md").read_text()
    assert made.intro in page, "and how it was measured"
    assert page.endswith(f"{made.source}\n")
    assert made.notes.partition("\n")[0] in page, "run python -m benchmarks.paced --page-only"


def test_on_a_clock_second_choices_are_worth_what_the_page_says() -> None:
    """The shipped ends and the shipped speculator; no machine's speed is in it."""
    setting = Setting(name="a quarter", pace=flat(0.080, 0.020), batch=8)
    coupled, first, second = (
        fmean(play(seed).over_off for seed in range(6))
        for play in (
            lambda seed: clocked.coupled(setting, seed=seed),
            lambda seed: clocked.decoupled(setting, runner_up=0.0, seed=seed),
            lambda seed: clocked.decoupled(setting, runner_up=0.5, seed=seed),
        )
    )
    assert 1.4 < coupled < 1.69  # of endless batches
    assert first > 1.05 * coupled
    assert second > 1.12 * first
    assert second > 1.95


def test_on_a_clock_a_drafter_over_text_is_worth_what_the_page_says() -> None:
    """Requests that it serves run ahead; whether the batch ends sooner depends on how long responses are."""
    equal = Setting(name="a quarter", pace=flat(0.080, 0.020), batch=8)
    tail = replace(equal, tail=True, tokens=256)
    plays = {
        (text, kind): [clocked.coupled(setting, seed=seed, with_text=text) for seed in range(6)]
        for text in (False, True)
        for kind, setting in (("equal", equal), ("tail", tail))
    }
    ends = {key: fmean(play.over_off for play in of) for key, of in plays.items()}
    begins = {key: fmean(play.begin for play in of) for key, of in plays.items()}
    assert begins[True, "equal"] > 1.2 * begins[False, "equal"]
    assert ends[True, "equal"] < ends[False, "equal"]
    assert ends[True, "tail"] > ends[False, "tail"]


def test_on_a_clock_dear_lanes_have_no_second_choices() -> None:
    """Where every lane costs, drafting on from second choices must not cost speed."""
    pace = flat(0.080, 0.020)
    dear = Grid(requests=(1.0, 64.0), per_request=(1.0,), seconds=((0.005,), (0.320,)))
    setting = Setting(name="dear", pace=msgspec.structs.replace(pace, draft=dear), batch=8)
    speeds = [clocked.decoupled(setting, runner_up=share).over_off for share in (0.0, 0.5)]
    assert speeds[1] > 0.95 * speeds[0]


def test_rows_carry_when_and_where_they_were_measured() -> None:
    rows = [["a", "2026-11-27", "2 cores"], ["b", "2026-11-25", "2 cores"], ["c", "2026-11-26", "8 cores"]]
    assert paced.source(rows) == "Measured: 2026-11-25 to 2026-11-27, 2 cores; 2026-11-26, 8 cores."


def test_the_page_says_beside_which_rows_other_tests_ran() -> None:
    rows = [["a", "2 cores"], ["b", f"2 cores{paced.BESIDE}"], ["b", f"2 cores{paced.BESIDE}"]]
    assert paced.beside_tests(rows).endswith("tells how much): b.")
    assert paced.beside_tests(rows[:1]) == ""


def test_the_page_says_where_the_machine_was_busy() -> None:
    """Plain decoding has nothing to wait for between passes but the machine; wrong was: its contestants count, too."""

    def rows(between_ms: float) -> list[list[str]]:
        row = dict.fromkeys(paced.COLUMNS, "0") | {"setting": SETTING.name, "between, ms per pass": f"{between_ms}"}
        drafting = row | {"contestant": "coupled", "between, ms per pass": "90"}
        return [list((row | {"contestant": "off"}).values()), list(drafting.values())]

    known = {SETTING.name: SETTING}
    most_ms = 1e3 * PASS_S * paced.MUCH_BETWEEN
    assert "plain decoding was not held up" in paced.busy(rows(0.9 * most_ms), known)
    assert "in 1 of 1 settings" in paced.busy(rows(1.1 * most_ms), known)


@pytest.mark.deep
def test_passes_and_steps_take_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On any machine they take no less, and the tokens are those of plain decoding; drafts save passes."""
    monkeypatch.setattr(paced_devices, "MUCH", 1.0)  # of a busy machine
    with started(SETTING, tmp_path, batches=1) as devices:
        [batch] = devices.requests
        assert devices.decode(batch, SpeculationConfig()) >= (SETTING.tokens - 1) * PASS_S
        plain = devices.passes()
        assert plain.busy_s >= plain.passes * PASS_S
        with devices.drafter(replace_acceptance(script_of(SETTING, runner_up=1.0))):
            for way in paced.CONTESTANTS.values():
                devices.begin(way)
                devices.decode(shortened(batch), way)
                devices.decode(batch, way)  # ends the run for a token that differs
                assert devices.counts().accepted > 0


def test_more_dilation_is_asked_for_where_computing_takes_more_than_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Busy:
        def rank_call(self, name: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
            return [msgspec.json.encode({"passes": 100, "busy_s": 9.0, "own_s": 6.0, "over_half": 7})]

    devices = paced_devices.Devices(
        setting=SETTING,
        engines=[Busy()],
        endpoint="",
        folder=tmp_path,
        requests=[],  # type: ignore[list-item]
    )
    with pytest.raises(DisturbedError, match=r"in 7 of 100 passes .* Use more dilation than 1"):
        devices.passes()


def test_a_disturbed_turn_is_taken_again() -> None:
    turns = iter([True, True, False])

    def take() -> str:
        if next(turns):
            raise DisturbedError
        return "measured"

    assert paced_devices.undisturbed(take) == "measured"
    turns = iter([True] * paced_devices.TURNS)
    with pytest.raises(DisturbedError):
        paced_devices.undisturbed(take)


def replace_acceptance(script: Script) -> Script:
    return msgspec.structs.replace(script, acceptance=0.9)
