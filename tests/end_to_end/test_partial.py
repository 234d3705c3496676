"""A run whose steps stop when enough groups are complete, on two engines.

Deep: `rollout/test_refill.py` and `rollout/sglang/test_interruptions.py` show which groups are kept, and that responses
go on with their tokens; this takes two launches.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specactor.metrics import TAIL, read_metrics
from specactor.rollout import resume
from specactor.rollout.resume import OpenGroup
from tests.end_to_end.conftest import Launched, Launcher

pytestmark = pytest.mark.deep
OPTIONS = (
    *("--parallel.engines", "2", "--rollout.oversample", "2", "--rollout.partial", "True", "--eval.problems", "0"),
    *("--rollout.audit", "stop"),
)


@pytest.fixture(scope="module")
def partial(launcher: Launcher) -> Launched:
    return launcher.run("partial", *OPTIONS)


def kept_open(folder: Path, step: int) -> list[OpenGroup]:
    about = json.loads((folder / "checkpoints" / f"step-{step:06d}" / "state.json").read_text())
    return resume.restored(about["state"]["open_groups"], group_size=8)


def test_steps_stop_and_go_on_across_a_resume(partial: Launched, launcher: Launcher) -> None:
    """The gap to the trainer is of tokens of the step's own policy alone: it would be far larger with the others."""
    assert partial.code == 0, partial.output
    left = kept_open(partial.folder, 2)
    assert len(left) == 8, "16 in flight, 8 learned from"
    again = launcher.run("partial", *OPTIONS, "--resume", "auto", "--train.steps", "3")
    assert again.code == 0, again.output
    lines = [line for line in read_metrics(partial.folder) if line["step"]]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert {line["train/sequences"] for line in lines} == {64}
    assert {line["tail/open_groups"] for line in lines} == {8}
    assert {f"tail/{name}" for name in TAIL if name != "drafters_woken"} <= set(lines[-1])
    assert lines[0]["tail/stale_tokens"] == 0
    assert float(str(lines[1]["tail/open_tokens"])) == sum(
        len(r.begun.token_ids) for group in left for r in group.pending if r.begun is not None
    )
    if any(group.finished or r.begun for group in left for r in group.requests):
        ids = {r.request_id for group in left for r in group.requests}
        later = {r.request_id for group in kept_open(partial.folder, 3) for r in group.requests}
        assert ids - later, "what was begun first is learned from first"
        assert float(str(lines[2]["tail/stale_tokens"])) > 0
    gaps = [float(str(line["agreement/logprob_gap_max"])) for line in lines]
    assert max(gaps) < 1e-4
    for line in lines:
        fresh = float(str(line["rollout/tokens"])) - float(str(line["tail/stale_tokens"]))
        assert (line["audit/scored"], line["audit/unpicked"]) == (fresh, 0)
