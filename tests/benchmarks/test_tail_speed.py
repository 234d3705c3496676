"""The tail benchmark without an engine: lengths, where the tail begins, ratios, aims, and that tokens are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tail_speed as bench
from benchmarks.tail_speed import CONTESTANTS, Contest, Work
from benchmarks.tail_speed_table import COLUMNS, Law, Run, Tally, Timeline, result, tail_of
from benchmarks.trained_models import Models
from examples.quickstart_tasks import add
from specactor.rollout.speculation.counters import Counts
from specactor.types import RolloutRequest, SamplingParams, Trajectory

TWO, THREE = "auto, fastest of 2", "auto, fastest of 3"


@pytest.mark.parametrize("law", [bench.LAW, Law(shortest=24, longest=320)])
def test_lengths_are_heavy_tailed_and_every_rollout_is_as_long(law: Law) -> None:
    lengths = law.lengths(64, seed=1)
    assert lengths == law.lengths(64, seed=1) != law.lengths(64, seed=2)
    assert sorted(lengths) == sorted(law.lengths(64, seed=2))
    assert min(lengths) >= law.shortest
    assert max(lengths) == law.longest
    ordered = sorted(lengths)
    assert ordered[32] <= 2.1 * law.shortest  # the median of the law is 2
    assert sum(ordered[-16:]) > sum(ordered[:48])  # a quarter of the responses has most of the tokens


def test_the_tail_is_the_longest() -> None:
    assert tail_of({"a": 3, "b": 9, "c": 4, "d": 9}, 2) == {"b", "d"}
    assert tail_of({"a": 5, "b": 5, "c": 5}, 1) == {"a"}


def timeline() -> Timeline:
    """Two short responses, which end 1 s and 2 s after the start, and two long ones, which end after 5 s and 4 s."""
    made = Timeline(began=100.0)
    for name, second, tokens in (
        ("short", 1.0, 10),
        ("a", 1.0, 8),
        ("b", 1.5, 16),
        ("short too", 2.0, 12),
        ("a", 3.0, 16),
        ("b", 4.0, 26),
        ("a", 5.0, 30),
    ):
        made.report(name, 100.0 + second, tokens)
    return made


def test_the_tail_begins_when_the_last_other_response_ends() -> None:
    run = timeline().run({"a", "b"})
    assert (run.tokens, run.seconds) == (78, 5.0)
    assert run.tail_s == 3.0  # not 4.0: one short response may end long before the other
    assert run.tail_tokens == (30 - 12) + (26 - 18)  # linear between reports
    assert run.speed == pytest.approx(78 / 5)
    assert run.tail_speed == pytest.approx(26 / 3)


def test_a_response_that_ended_early_has_nothing_left() -> None:
    assert timeline().run({"a", "short"}).tail_tokens == pytest.approx((5 - 4) / 2 * 14)  # b ends after 4 s


def test_rollouts_add_up() -> None:
    run = timeline().run({"a", "b"})
    total = Run.total([run, Run(tokens=22, seconds=15.0, tail_tokens=4.0, tail_s=7.0)])
    assert (total.speed, total.tail_speed) == (100 / 20, 30 / 10)


@pytest.mark.parametrize("tail", [{"short"}, {"a", "b", "short", "short too"}])
def test_no_tail_is_refused(tail: set[str]) -> None:
    with pytest.raises(ValueError, match="tail: got"):
        timeline().run(tail)


def tally(speeds: dict[str, Sequence[tuple[float, float]]]) -> Tally:
    """Args: contestant -> (tokens/s of the rollout, of the tail) per repetition."""
    made = Tally(model="B")
    for name, pairs in speeds.items():
        for speed, tail_speed in pairs:
            run = Run(tokens=round(speed * 10), seconds=10.0, tail_tokens=tail_speed * 2, tail_s=2.0)
            made.add(name, run, {} if name == "off" else {"suffix": (30, 20, 60), "model": (0, 0, 20)})
    return made


def test_ratios_are_within_a_repetition() -> None:
    made = tally({"off": [(100, 50), (200, 100)], "auto": [(100, 100), (400, 100)]})
    assert made.ratios("auto", "off", tail=False) == [1.0, 2.0]
    assert made.ratios("auto", "off", tail=True) == [2.0, 1.0]
    row = made.row("auto")
    assert row == ["B: auto", "250", "1.50 (1.00-2.00)", "100", "1.50 (1.00-2.00)", "1.50", "suffix 75%, model 25%"]
    assert made.row("off")[2] == "-"
    assert len(row) == len(COLUMNS)


def test_the_best_single_drafter_may_be_another_in_the_tail() -> None:
    made = tally(
        {"off": [(100, 50)], "suffix, chosen": [(120, 50)], "model, chosen": [(110, 90)], "auto": [(300, 300)]}
    )
    assert made.best_single(tail=False) == "suffix, chosen"
    assert made.best_single(tail=True) == "model, chosen"  # auto is none
    assert tally({"off": [(1, 1)]}).best_single(tail=True) is None


def aims(tail: float, rollout: float) -> tuple[str, str]:
    """What is said of both, where Fastest-of-2 has these speeds over one drafter's."""
    made = tally(
        {"off": [(50, 50)] * 3, "auto": [(100, 100)] * 3, TWO: [(rollout, tail), (10, 10), (rollout, tail)]},
    )
    *_, most, least = made.verdicts()
    return most, least


def test_aims() -> None:
    most, least = aims(tail=111, rollout=99)
    assert most.endswith(": met.")
    assert least.endswith(": met.")
    most, least = aims(tail=109, rollout=97)
    assert most.endswith(f"missed by {TWO}.")
    assert f"missed by {TWO}, rollout 0.97" in least
    assert f"{TWO}, tail 0.97" in aims(tail=97, rollout=100)[1]


def test_the_page_of_what_was_asked_for() -> None:
    made = tally({"off": [(100, 50)], "auto": [(100, 60)], THREE: [(100, 72)]})
    page = result([made], bench.SETTINGS, 0.5, 8)
    assert [row[0] for row in page.rows] == ["B: off", "B: auto", f"B: {THREE}"]
    assert "1.20" in page.notes
    alone = result([tally({"off": [(100, 50)]})], bench.SETTINGS, 0.5, 8)
    assert "aim" not in alone.notes


def test_prompts_end_with_the_first_digit_of_the_working() -> None:
    for terms in ([17, 4], [5, 30, 2], [0, 0], [90, 9]):
        assert add(terms).startswith(bench.first_digit("+".join(map(str, terms)) + "="))


def test_contestants() -> None:
    assert [CONTESTANTS[name].fastest_of for name in ("auto", TWO, THREE)] == [1, 2, 3]
    assert len({CONTESTANTS[name].drafters for name in ("auto", TWO, THREE)}) == 1
    assert {CONTESTANTS[f"{drafter}, window 4"].window for drafter in bench.DRAFTERS} == {4}
    assert next(iter(CONTESTANTS)) == "off"


class FakeEngine:
    """Writes a request's seed over and over; `wrong` changes the tokens of a way to speculate."""

    def __init__(self, wrong: Callable[[str, list[int]], list[int]]) -> None:
        self._wrong = wrong
        self._way = b""

    def rank_call(self, name: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        self._way = payload
        return [b""]

    def speculation_counts(self) -> dict[str, Counts]:
        return {}

    def generate(self, requests: Sequence[RolloutRequest], *, on_finished: Any, **_: Any) -> list[Trajectory]:
        responses = []
        for request in sorted(requests, key=lambda r: r.sampling.max_new_tokens):
            tokens = self._wrong(self._way.decode(), [request.seed] * request.sampling.max_new_tokens)
            response = Trajectory(
                request_id=request.request_id,
                group_id=request.group_id,
                prompt_ids=request.prompt_ids,
                token_ids=tuple(tokens),
                logprobs=(0.0,) * len(tokens),
                finish_reason="length",
                spans=(),
            )
            on_finished(response)
            responses.append(response)
        return responses


def work(repetition: int) -> Work:
    """Two rollouts."""
    return Work(
        repetition=repetition,
        rollouts=[
            [
                RolloutRequest(
                    request_id=f"{rollout}.{i}",
                    prompt_ids=(1,),
                    sampling=SamplingParams(temperature=1.0, max_new_tokens=2 + i),
                    seed=i,
                    group_id=0,
                )
                for i in range(20)
            ]
            for rollout in range(2)
        ],
    )


def contest(wrong: Callable[[str, list[int]], list[int]]) -> Contest:
    engine: Any = FakeEngine(wrong)
    return Contest("B", engine, Models(target=Path("target"), draft=Path("draft")))


def test_a_warm_up_is_not_counted() -> None:
    right = contest(lambda way, tokens: tokens)
    for repetition in (-1, 0, 1):
        right.take(work(repetition), ["off", "auto"])
    assert [len(runs) for runs in right.tally.runs.values()] == [2, 2]
    assert right.tally.runs["off"][0].tokens == 2 * sum(2 + i for i in range(20))


def test_one_wrong_token_ends_the_benchmark() -> None:
    wrong = contest(lambda way, tokens: [*tokens[:-1], 99] if '"fastest_of":2' in way else tokens)
    wrong.take(work(0), ["off", "auto"])
    with pytest.raises(SystemExit, match="fastest of 2"):
        wrong.take(work(1), ["off", "auto", TWO])
    with pytest.raises(SystemExit, match="off"):  # also where the wrong one comes first
        wrong.take(work(1), [TWO, "off"])
