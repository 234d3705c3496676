"""What becomes of the groups of conversations that failed."""

from __future__ import annotations

import io
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from specactor import measurements
from specactor.config import AlgorithmConfig, EvalConfig, RolloutConfig
from specactor.errors import DataError
from specactor.progress import Progress
from specactor.rollout.collector import RolloutCollector
from specactor.types import Problem, Trajectory

PROBLEMS = [
    Problem(index=i, prompt="", prompt_ids=(1,), answer="", verifier="tests.rollout.environments:Talks", metadata={})
    for i in range(3)
]


def responses(failed: set[int]) -> list[Trajectory]:
    """Three groups of four; the reward is the number of the response."""
    return [
        Trajectory(
            request_id=str(i),
            group_id=i // 4,
            prompt_ids=(1,),
            token_ids=(2, 3),
            logprobs=(-1.0, -1.0),
            finish_reason="stop",
            spans=(),
            reward=float(i),
            failure="mine: step: no answer in time" if i in failed else "",
        )
        for i in range(12)
    ]


class Collector(RolloutCollector):
    """Without engines and ranks."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        rollout = RolloutConfig(prompts_per_step=3, group_size=4, max_new_tokens=8)
        self.config = cast(
            "Any", SimpleNamespace(rollout=rollout, algorithm=AlgorithmConfig(), eval=EvalConfig(samples=4), seed=0)
        )
        self.progress = cast("Any", SimpleNamespace(note=self.notes.append, phase=lambda name: nullcontext()))
        self.collective = cast(
            "Any",
            SimpleNamespace(rank=0, world=1, together=lambda name, work: work(), gather=lambda value, kind: [value]),
        )
        self.num_failed = self.num_unscored = 0
        self._first_failure, self._warned = "", set()


def test_a_failed_conversation_is_left_out_of_its_group() -> None:
    collector = Collector()
    groups = collector._score_groups(PROBLEMS, responses({1, 4, 5, 6}))
    assert [(g.problem.index, g.rewards) for g in groups] == [(0, (0.0, 2.0, 3.0)), (2, (8.0, 9.0, 10.0, 11.0))]
    assert [len(g.trajectories) for g in groups] == [3, 4]
    assert collector.num_failed == 4
    assert collector.notes == ["environments: 4 of 12 conversations failed; the first: mine: step: no answer in time"]


def test_a_sessions_longest_sequence_is_what_overlong_shaping_takes_from() -> None:
    """Whichever of them comes first. Wrong: the first one's length."""
    collector = Collector()
    collector.config.algorithm = AlgorithmConfig(overlong_buffer=4)  # type: ignore[misc]
    short, *others = responses(set())[:4]
    long = replace(short, token_ids=(2,) * 7, logprobs=(-1.0,) * 7)
    both = [replace(short, branches=(long,)), replace(long, branches=(short,))]
    [group] = collector._score_groups(PROBLEMS[:1], [*both, *others[:2]])
    assert group.rewards == (-0.75, -0.75, 1.0, 2.0)


def test_nothing_is_left_out_where_nothing_failed() -> None:
    collector = Collector()
    assert [g.scores for g in collector._score_groups(PROBLEMS, responses(set()))] == [
        (0.0, 1.0, 2.0, 3.0),
        (4.0, 5.0, 6.0, 7.0),
        (8.0, 9.0, 10.0, 11.0),
    ]
    assert collector.notes == []


def test_a_step_without_groups_ends_the_run_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    collector, failed = Collector(), set(range(12)) - {0, 5}
    monkeypatch.setattr(collector, "_collect_all", lambda step: collector._score_groups(PROBLEMS, responses(failed)))
    with pytest.raises(DataError) as caught:
        collector.collect(0)
    assert str(caught.value) == (
        "environments and verifiers: 10 responses of a step failed, and no group is left to learn from; the first: "
        "mine: step: no answer in time. Correct what failed, or raise rollout.environment_timeout_s."
    )


def test_a_response_whose_verifier_failed_does_not_count_in_an_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each evaluation says so. A conversation that failed scores 0."""
    collector, judge = Collector(), "ClientConnectorError: verifier http://judge: problem 0: nobody is there"
    given = [
        replace(t, reward=None if i < 6 else 1.0, failure=judge if i < 5 else t.failure)
        for i, t in enumerate(responses({5}))
    ]
    monkeypatch.setattr(collector, "_generate_all", lambda *args, **kwargs: given)
    for _ in range(2):
        groups = collector._evaluated(PROBLEMS)
        assert [group.scores for group in groups] == [(), (0.0, 1.0, 1.0), (1.0,) * 4]
        assert [len(group.trajectories) for group in groups] == [0, 3, 4]
        found = measurements.of_evaluation({"eval": groups})
        assert (found["accuracy/eval"], found["score/eval"]) == (6 / 7, 6 / 7)
        assert (found["accuracy/eval/pass@2"], found["accuracy/eval/pass@4"]) == (1.0, 1.0)
    told = f"held-out problems: 5 of 12 responses have no score and do not count; the first: {judge}"
    assert [note for note in collector.notes if note.startswith("held-out")] == [told, told]
    collector._generate_all = lambda *args, **kwargs: [replace(t, failure=judge) for t in given]  # type: ignore[method-assign]
    assert measurements.of_evaluation({"eval": collector._evaluated(PROBLEMS)}) == {}


def test_what_was_not_released_is_told_once_with_its_number() -> None:
    """Of all ranks, also what comes after the rollout. Wrong before: nothing was said."""
    collector, out = Collector(), io.StringIO()
    collector.progress = Progress(1, console=Console(file=out, width=200))
    collector.pool = collector.drafters = cast("Any", SimpleNamespace(work=lambda **_: {}))
    collector.host, collector._drafters_woken, collector._groups_moved = "here", 0, 0
    collector.collective = cast(
        "Any", SimpleNamespace(together=lambda _, work: work(), gather=lambda value, kind: [value, value])
    )
    collector._unreleased = ["mine:Tool: close: OSError('busy')", "mine:Tool: close: no answer in time"]
    collector.take_stats()
    collector.take_stats()
    collector._unreleased.append("mine:Tool: close: KeyError(3)")
    collector.take_stats()
    assert [line.partition("] ")[2] for line in out.getvalue().splitlines()] == [
        "environments: `close` failed 4 times, so what they hold may be left; the first: mine:Tool: close: "
        "OSError('busy')",
        "environments: `close` failed 2 times, so what they hold may be left; the first: mine:Tool: close: KeyError(3)",
    ]
