"""What the page on recycled noise says of runs and responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from benchmarks.recycled_noise import price
from benchmarks.recycled_noise_runs import EPOCH, STEPS, Run, all_runs
from benchmarks.recycled_noise_speed import right
from specactor.metrics import Value
from specactor.types import Trajectory


@dataclass
class Response:
    token_ids: tuple[int, ...]


def share(now: tuple[int, ...], before: tuple[int, ...]) -> float:
    return right([cast("Trajectory", Response(now))], [cast("Trajectory", Response(before))])


def test_a_token_is_right_at_its_own_position() -> None:
    assert share((1, 2, 3, 4), (1, 9, 3, 4, 5)) == 0.75
    assert share((1, 2, 3, 4), (2, 3, 4)) == 0.0, "not where another text has it"
    assert share((1, 2, 3, 4), (1, 2)) == 0.5, "where nothing stood nothing is right"


def lines(*accuracies: float, **further: Value) -> list[dict[str, Value]]:
    found: list[dict[str, Value]] = [
        {"step": step, "accuracy/train": accuracies[-1], **further} for step in range(STEPS + 1)
    ]
    for place, accuracy in enumerate(accuracies):
        found[2 * EPOCH * place]["accuracy/eval"] = accuracy
    return found


def run(visits: int, seed: int, *, drafts: bool = True) -> Run:
    return Run(task="bits", visits=visits, seed=seed, drafts=drafts)


def test_prices_are_of_equal_seeds() -> None:
    drafted: dict[str, Value] = {"speculation/previous/drafted": 10, "speculation/previous/accepted": 8}
    runs = {run(v, 0): lines(0.5, 0.6, 0.7, 0.8, 0.9 - v / 50, **drafted) for v in (1, 2, 4)}
    runs |= {run(v, 1): lines(0.5, 0.6, 0.7, 0.8, 0.8 - v / 10) for v in (1, 2, 4)}
    runs[run(1, 2)] = lines(0.5, 0.0, 0.0, 0.0, 0.0)  # the others of its seed are missing
    found = price(runs)
    assert [row[:4] for row in found] == [["bits", v, "2", "0.500"] for v in ("1", "2", "4")]
    assert [row[5] for row in found] == ["0.790", "0.730", "0.610"]
    assert [row[6] for row in found] == ["-", "-0.015 (-0.025 to -0.005)", "-0.045 (-0.075 to -0.015)"]
    assert [row[7] for row in found] == ["-", "-0.060 (-0.100 to -0.020)", "-0.180 (-0.300 to -0.060)"]
    assert {row[8] for row in found} == {"0.80"}


def test_every_run_is_made_once() -> None:
    names = [run.name for run in all_runs()]
    assert len({*names}) == len(names) == 20
