"""A run whose second rank has nothing to roll out: the draft model learns there meanwhile, and no token changes."""

from __future__ import annotations

from specactor.metrics import read_metrics
from tests.end_to_end.conftest import Launcher
from tests.end_to_end.test_run import deterministic

ONE_GROUP = (
    *("--train.steps", "3", "--rollout.prompts-per-step", "1", "--parallel.engines", "2"),
    *("--rollout.engine.max-running-requests", "2", "--eval.problems", "0", "--checkpoint.export", "False"),
)
"""One engine has nothing to do while the other generates two responses at a time."""
LEARNING = (
    *("--rollout.speculation.mode", "coupled", "--rollout.speculation.drafters", "model"),
    *("--rollout.speculation.window", "2", "--distillation.refresh", "every_step", "--distillation.max-updates", "1"),
    *("--distillation.max-time-share", "inf"),
    *("--distillation.tokens-per-update", "64", "--distillation.tokens-per-microbatch", "256"),
)


def test_a_rank_without_requests_teaches_the_draft_model(launcher: Launcher, draft_model: str) -> None:
    model = ("--rollout.speculation.draft-model", draft_model)
    runs = {
        idle: launcher.run(f"idle-{idle}", *ONE_GROUP, *LEARNING, *model, "--distillation.idle", idle)
        for idle in ("True", "False")
    }
    for run in runs.values():
        assert run.code == 0, run.output
    assert deterministic(runs["True"].folder) == deterministic(runs["False"].folder)
    updates = {
        idle: [int(float(str(line["drafter/idle_updates"]))) for line in read_metrics(run.folder)]
        for idle, run in runs.items()
    }
    assert updates["False"] == [0, 0, 0]
    first, *later = updates["True"]
    assert first == 0, "there was nothing to learn from yet"
    assert sum(later) > 0
    lines = read_metrics(runs["True"].folder)
    assert [line["drafter/oldest_version"] for line in lines] == [line["drafter/version"] for line in lines]
