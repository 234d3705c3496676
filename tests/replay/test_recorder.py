"""What a record says of sessions with branches, and of a part that was generated again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import specactor.trainer.model  # noqa: F401  # first of what imports Megatron
from specactor.recipes import load
from specactor.replay import records
from specactor.replay.recorder import StepRecorder
from specactor.samples import packed
from specactor.types import Problem, ScoredGroup, TrainSequence, Trajectory, VersionSpan


class Alone:
    """A job of one rank."""

    rank = 0

    def gather(self, value: Any, _: object, *, only_first: bool = False) -> list[Any]:
        return [value]


class Walks:
    """An agent."""

    async def run(self, problem: Problem, base_url: str, api_key: str) -> float:
        return 1.0


def response(name: str, *tokens: int, mask: tuple[bool, ...] = (), branches: tuple[Trajectory, ...] = ()) -> Trajectory:
    return Trajectory(
        request_id=name,
        group_id=0,
        prompt_ids=(1, 2),
        token_ids=tokens,
        logprobs=(-0.5,) * len(tokens),
        finish_reason="stop",
        spans=(VersionSpan(version=0, start=0, end=len(tokens)),),
        loss_mask=mask,
        branches=branches,
    )


def step_of(
    folder: Path, session: Trajectory, verifier: str, data: int | None, *, is_suspect: bool = False
) -> records.StepRecord:
    """The record of the session and a plain response after it."""
    problem = Problem(index=0, prompt="", prompt_ids=(1, 2), answer="", verifier=verifier, metadata={})
    both = packed(session), packed(response("0.0.1", 9))
    group = ScoredGroup(problem=problem, trajectories=both, scores=(1.0, 0.0), rewards=(1.0, 0.0))
    batch = [
        TrainSequence(token_ids=(1,), prompt_len=1, advantage=advantage)
        for t, advantage in zip(both, (0.25, -0.25), strict=True)
        for _ in (t, *t.branches)
    ]
    recorder = StepRecorder(load(["quickstart_plain"]), folder, trainer=None, collective=Alone())  # type: ignore[arg-type]
    stands = None if data is None else lambda: data
    recorder.stepped(1, 0, [group], batch, None, stands, is_suspect=is_suspect)
    return records.read(records.file_of(folder, 1))


SESSION = response(
    "0.0.0", 3, 4, 5, mask=(True, False, True), branches=(response("b", 6), response("c", 7, 8, mask=(True, False)))
)


def test_a_response_after_a_session_has_its_own_advantage(tmp_path: Path) -> None:
    record = step_of(tmp_path, SESSION, f"{__name__}:Walks", 1)
    assert [s.advantage for s in record.samples] == [0.25, -0.25]
    assert [s.seeded for s in record.samples] == [1, None]
    assert record.samples[1].branches == 0


@pytest.mark.parametrize("changes", [{"token_ids": (10,)}, {"logprobs": (-0.25,)}, {"prompt_ids": (1,)}])
def test_a_session_is_recorded_with_its_branches(changes: dict[str, Any], tmp_path: Path) -> None:
    first, second = SESSION.branches
    other = replace(SESSION, branches=(replace(first, **changes), second))
    ours, theirs, again = (step_of(tmp_path, s, "exact", 1).samples[0] for s in (SESSION, other, SESSION))
    assert ours == again
    assert ours.branches != theirs.branches
    assert ours == msgspec.structs.replace(theirs, branches=ours.branches)
    assert ours.seeded is None, "turns of an environment go on with one seed"


def test_a_part_says_nothing_of_where_the_data_stand(tmp_path: Path) -> None:
    assert step_of(tmp_path, SESSION, "exact", None).data == 0
    assert step_of(tmp_path, SESSION, "exact", 7).data == 7


def test_a_step_in_which_an_audit_found_something_is_kept_whole(tmp_path: Path) -> None:
    for is_suspect in (False, True):
        record = step_of(tmp_path, SESSION, "exact", None, is_suspect=is_suspect)
        assert [bool(s.whole) for s in record.samples] == [is_suspect, is_suspect]


def test_without_records_nobody_asks_where_the_data_stand(tmp_path: Path) -> None:
    """Which takes a look at every open response."""

    def never() -> int:
        raise AssertionError

    config = load(["quickstart_plain", "--tracking.record", "off"])
    recorder = StepRecorder(config, tmp_path, trainer=None, collective=Alone())  # type: ignore[arg-type]
    recorder.started(0, never)
    recorder.stepped(1, 0, [], [], None, never)
    assert not list(tmp_path.iterdir())
