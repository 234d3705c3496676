"""The parts of the trainer benchmark that decide what is compared."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from subprocess import DEVNULL, Popen

from benchmarks import trainer_speed, trainer_speed_case


def test_sequences_are_the_same_for_everyone() -> None:
    made = trainer_speed_case.sequences(64)

    assert made == trainer_speed_case.sequences(64)
    assert len(made) == 128
    assert {20 <= len(s.token_ids) <= 60 and s.response_len == len(s.rollout_logprobs) for s in made} == {True}
    assert max(token for s in made for token in s.token_ids) == 63


def contestant(entry: trainer_speed.Entry, folder: Path) -> trainer_speed.Contestant:
    folder.mkdir()
    return trainer_speed.Contestant(entry, folder, Popen([sys.executable, "-c", "input()"], stdin=-1, stdout=DEVNULL))


def test_a_contestant_takes_turns_with_its_fastest_setting(tmp_path: Path) -> None:
    us = contestant(trainer_speed.ENTRIES[0], tmp_path / "us")
    seen: list[float] = []

    def step(setting: float) -> float:
        threading.Event().wait(setting)
        seen.append(setting)
        return 0.25

    served = threading.Thread(
        target=trainer_speed_case.serve,
        args=(us.folder,),
        kwargs={"rank": 0, "settings": [1.0, 0.001, 0.5], "step": step, "barrier": lambda: None},
    )
    served.start()
    try:
        assert us.choose() == 0.25
        assert (us.settings, us.best) == (["1.0", "0.001", "0.5"], 1)
        assert us.turn(us.best)["seconds"] < 0.5
        assert seen[-1] == 0.001
        assert us.process.stdin is not None
        us.process.stdin.close()
        us.turn(None)
        served.join(timeout=60)
        assert not served.is_alive()
    finally:
        us.process.kill()
        us.process.wait()


def test_each_row_is_compared_with_the_fastest_plain_loop_on_as_many_cores(tmp_path: Path) -> None:
    seconds = {"SpecActor": 2.0, "PyTorch": 1.5}
    contestants = []
    for number, entry in enumerate(trainer_speed.ENTRIES):
        each = contestant(entry, tmp_path / str(number))
        each.process.kill()
        each.process.communicate()
        each.settings, each.seconds = ["8"], [seconds[entry.name.split(",")[0]] + 0.1 * number] * 3
        contestants.append(each)

    table = trainer_speed.rows("m", contestants, tokens=1000)

    ratios = {row[2]: row[-1] for row in table}
    assert ratios["SpecActor, 1 process"] == "0.80"  # 1.6 / 2.0
    assert ratios["PyTorch, 1 thread"] == "1.00"
    assert ratios["SpecActor, 2 processes, EP2"] == "0.86"  # 1.9 / 2.2, not 1.6 / 2.2
    assert "Missed by SpecActor, 1 process (m): 0.80" in trainer_speed.result(table, 3, 0.1).verdict
