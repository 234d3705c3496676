"""The display: plain lines without a terminal, a live line with one."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable

from rich.console import Console

from specactor.metrics import Value
from specactor.progress import Progress, duration, summary_rows
from specactor.rollout.speculation.counters import Counts
from specactor.types import Trajectory

METRICS = {
    "reward/mean": 0.5,
    "accuracy/train": 0.25,
    "rollout/tokens_per_s": 1234.5,
    "agreement/logprob_gap_max": 3e-6,
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def finished(tokens: int) -> Trajectory:
    return Trajectory(
        request_id="r",
        group_id=0,
        prompt_ids=(1,),
        token_ids=(2,) * tokens,
        logprobs=(0.0,) * tokens,
        finish_reason="stop",
        spans=(),
    )


def run(
    console: Console,
    *,
    quiet: bool = False,
    look: Callable[[int], None] = lambda step: None,
) -> Progress:
    """Args: what is called when all responses of a step are finished."""
    clock = Clock()
    with Progress(3, quiet=quiet, console=console, clock=clock) as progress:
        with progress.phase("warm-up", announce=True):
            clock.now += 7
        for step in (1, 2, 3):
            with progress.phase("rollout"):
                clock.now += 4
                for _ in range(3):
                    progress.response(finished(1000))
                look(step)
            with progress.phase("train"):
                clock.now += 2
            progress.step_line(step, METRICS)
        progress.summary([("accuracy", "0.500 -> 0.900"), ("run folder", "runs/" + "x" * 100)])
    return progress


def test_what_is_wrong_with_a_drafter_is_printed_once_and_stands_in_the_summary() -> None:
    out = io.StringIO()
    with Progress(2, console=Console(file=out, width=80), clock=Clock()) as progress:
        for problems in (["Mine: KeyError: 3"], [], ["Mine: KeyError: 3", "Mine: and more"]):
            progress.drafter_problems({"mine": Counts(problems=problems), "off": Counts()})
    assert progress.problems == {"mine": ["Mine: KeyError: 3", "Mine: and more"]}, "until they are logged"
    assert out.getvalue().count("drafter mine: Mine: KeyError: 3. That costs speed, and changes no token.") == 1
    lines: list[dict[str, Value]] = [{"step": 1, "speculation/mine/problems": "Mine: a; Mine: b"}, {"step": 2}]
    rows = summary_rows([*lines, {"speculation/mine/problems": "Mine: b"}], seconds={}, places={})
    assert rows == [("drafter mine", "Mine: a; Mine: b")]


def test_without_a_terminal_there_are_only_plain_aligned_lines() -> None:
    out = io.StringIO()
    run(Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()
    assert lines[0] == "[    0.0 s] warm-up"
    assert len({len(line) for line in lines[1:5]}) == 1  # heading and steps, wider than the console, unbroken
    assert lines[2].split()[:3] == ["1/3", "0.500", "0.250"]
    assert "3.0e-06" in lines[2]
    assert lines[5] == "accuracy    0.500 -> 0.900"
    assert lines[6].endswith("x" * 100)
    assert len(lines) == 7


def test_on_a_terminal_a_live_line_shows_phase_speed_and_time_left() -> None:
    out = io.StringIO()

    def plain() -> str:
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())

    def until_shown(step: int) -> None:
        deadline = time.monotonic() + 60
        while f"step {step}/3  rollout  3 responses  750 tokens/s" not in plain():
            assert time.monotonic() < deadline, plain()
            time.sleep(0.02)

    run(Console(file=out, force_terminal=True, width=120), look=until_shown)
    text = out.getvalue()
    assert "\x1b[" in text
    assert re.search(r"step 3/3  rollout  3 responses  750 tokens/s  reward 0.500  0:02 left", plain())
    assert "accuracy    0.500 -> 0.900" in plain()
    assert "\x1b[?25h" in text, "the cursor is back"


def test_another_rank_prints_nothing_and_measures_its_phases() -> None:
    silent = io.StringIO()
    progress = run(Console(file=silent, force_terminal=True), quiet=True)
    assert silent.getvalue() == ""
    assert progress.total_seconds == {"warm-up": 7, "rollout": 12, "train": 6}


def test_phases_are_measured_also_when_they_fail_and_nest() -> None:
    clock = Clock()
    progress = Progress(1, quiet=True, clock=clock)
    try:
        with progress.phase("outer"):
            clock.now += 1
            with progress.phase("inner"):
                clock.now += 2
                raise KeyError
    except KeyError:
        pass
    assert progress.seconds() == {"inner": 2, "outer": 3}
    assert progress.seconds() == {}


def test_every_change_of_phase_is_told() -> None:
    told: list[tuple[str, int]] = []
    progress = Progress(9, quiet=True, on_phase=lambda phase, step: told.append((phase, step)))
    progress.resume(4)
    with progress.phase("outer"), progress.phase("inner"):
        pass
    progress.step_line(5, {})
    with progress.phase("checkpoint"):
        pass
    assert told == [("outer", 4), ("inner", 4), ("outer", 4), ("", 4), ("checkpoint", 5), ("", 5)]


def test_time_left_follows_the_pace() -> None:
    clock = Clock()
    progress = Progress(10, quiet=True, clock=clock)
    assert progress.time_left_s() is None
    clock.now += 100  # setting up is not part of the pace
    progress.step_line(0, {})
    for step in range(1, 5):
        clock.now += 5
        progress.step_line(step, {})
    assert progress.time_left_s() == 30
    assert (duration(75), duration(3700)) == ("1:15", "1:01:40")


def test_summary_rows() -> None:
    lines = [
        {"step": 0, "accuracy/eval": 0.5},
        {"step": 1, "reward/mean": 0.4, "rollout/tokens": 100, "time/rollout_s": 2.0},
        {"step": 2, "reward/mean": 0.8, "rollout/tokens": 300, "time/rollout_s": 2.0, "accuracy/eval": 0.9},
    ]
    lines[0] |= {"accuracy/aime": 0.125, "accuracy/aime/pass@2": 0.25}
    rows = dict(summary_rows(lines, seconds={"train": 3.25}, places={"run folder": "runs/x"}))
    assert rows == {
        "held-out accuracy": "0.500 -> 0.900",
        "held-out accuracy/aime": "0.125 -> 0.125",
        "reward": "0.400 -> 0.800",
        "rollout": "100 tokens/s",
        "time in train": "3.2 s",
        "run folder": "runs/x",
    }
