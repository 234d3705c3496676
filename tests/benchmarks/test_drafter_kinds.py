"""The table of kinds of drafters, from counts written by hand, and the learning of one tiny draft model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from benchmarks import drafter_kinds as module
from benchmarks.drafter_kinds import COLUMNS, GROUP_SIZE, PLAIN, QUICK, RUNNING, Rollout, Row, Work, verdict
from benchmarks.drafter_kinds_learning import Beginning, Job, Learned, learn, reach_s
from benchmarks.trained_models import task_recipe
from specactor.config import DraftTrainingConfig, SourceConfig, TinyModelConfig
from specactor.data.tiny_model import make_tiny_model
from specactor.rollout.speculation.counters import Counts
from specactor.trainer.drafter import acceptance, init
from specactor.trainer.drafter.buffer import TrainingExample
from specactor.types import Problem

LEARNED = Learned(name="1 layer", parameters=469_440, points=[(0.0, 1.5), (2.0, 3.9), (4.0, 4.0)], updates=60, tokens=9)


def rollout(tokens_per_s: float) -> Rollout:
    counts = Counts(verifies=10, emitted=30, accepted=20, drafted=40, draft_s=0.002)
    return Rollout(counts=counts, tokens=100, seconds=100 / tokens_per_s)


def row(name: str, together: float, alone: float, learned: Learned | None = None) -> Row:
    return Row(name=name, together=rollout(together), alone=rollout(alone), learned=learned)


def test_rows() -> None:
    cells = row("1 layer", 200, 50, LEARNED).cells()
    assert cells == [
        *("1 layer", "469 k", "50", "50", "3.00", "3.00", "0.50", "200", "50", "2.0"),
        "0: 1.50, 2: 3.90, 4: 4.00",
    ]
    assert row("suffix", 200, 50).cells()[9:] == ["0", "-"], "nothing is learned before it drafts"
    assert row(PLAIN, 200, 50).cells()[1:7] == ["-", "-", "-", "1.00", "1.00", "-"]
    assert len(cells) == len(COLUMNS)


def test_near_is_where_it_stays_near() -> None:
    assert reach_s([(0, 1.0), (1, 3.9), (2, 3.0), (4, 4.0)], 0.95) == 4, "a point that was lost again does not count"
    assert reach_s([(0, 3.9), (1, 4.0)], 0.95) == 0
    assert reach_s([(0, 1.0), (1, 2.0), (3, 3.0)], 0.95) == 3


def test_losers_are_named() -> None:
    rows = [row(PLAIN, 100, 50), row("suffix", 90, 60), row("1 layer", 150, 40)]
    text = verdict(rows)
    assert "With 64 requests: fastest 1 layer (1.50 of no drafter); slower than without a drafter: suffix." in text
    assert "With 1 request: fastest suffix (1.20 of no drafter); slower than without a drafter: 1 layer." in text
    assert "none is slower" in verdict(rows[:1])
    assert "| " not in module.page(rows, QUICK).notes


def test_no_request_is_generated_twice() -> None:
    """A text drafter that has seen a response drafts it without a fault."""
    problems = [
        Problem(index=i, prompt=str(i), prompt_ids=(i,), answer="", verifier="exact", metadata={})
        for i in range(QUICK.prompts + RUNNING)
    ]
    work = Work.of(task_recipe("A"), problems, QUICK)
    seeds = [request.seed for request in [*work.first, *work.together, *work.alone]]
    assert len(set(seeds)) == len(seeds) == RUNNING + QUICK.prompts * GROUP_SIZE + QUICK.alone
    prompts = [{request.prompt_ids for request in part} for part in (work.first, work.together, work.alone)]
    assert not prompts[0] & prompts[1]
    assert prompts[2] < prompts[1], "at the end of a rollout the others of a group are known"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    shape = TinyModelConfig(num_layers=2, hidden_size=32, num_experts=2)
    make_tiny_model(shape, 0, folder)
    return folder


@pytest.mark.parametrize("name", ["1 layer", "quarter width"])
@pytest.mark.deep
def test_a_draft_model_is_learned_and_kept(target: Path, tmp_path: Path, name: str) -> None:
    """Seconds and accept_length of every point; the model that is written is the one that was measured last."""
    job = Job(
        target=str(target),
        folder=str(tmp_path),
        beginnings={"1 layer": Beginning(), "quarter width": Beginning(hidden_size=32)},
        source=SourceConfig(task="count_bits"),
        responses=8,
        max_new_tokens=8,
        seconds=(2.0, 4.0),
        window=4,
        settings=DraftTrainingConfig(tokens_per_update=64, tokens_per_microbatch=256, learning_rate=1e-2),
    )
    assert msgspec.json.decode(msgspec.json.encode(job), type=Job) == job, "a job is told to another process"
    policy, chance = init.read_model(target), np.random.default_rng(0)
    examples = [
        TrainingExample(token_ids=chance.integers(3, 100, 16).astype(np.int32), prompt_len=4, version=0)
        for _ in range(8)
    ]
    taught = acceptance.with_top_k(policy, examples, top_k=16)
    found = learn(name, policy, job, taught, examples)
    assert len(found.points) == 3
    assert found.points[0][0] == 0
    assert 0 < found.points[1][0] < found.points[2][0]
    assert found.updates > 0
    kept = init.read_model(tmp_path / name)
    assert sum(p.numel() for p in kept.parameters()) == found.parameters
    again = acceptance.measure(policy, kept, examples, window=4, seed=0)
    assert again.accept_length == pytest.approx(found.points[-1][1])
