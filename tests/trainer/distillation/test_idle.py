"""A rank learns while others roll out: what all take over is what one rank would have learned, optimizer included."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specactor.errors import ConfigError
from specactor.parallel.collective import Collective
from specactor.trainer.distillation.train import DrafterTrainer
from tests.trainer.distillation import cases
from tests.trainer.distillation.idle_rank import ALONE, TOGETHER, made
from tests.trainer.distillation.ranks import run_ranks
from tests.trainer.distillation.refresh_cases import World


def idle_ranks(folder: Path, wrong: str = "") -> list[dict[str, Any]]:
    folder.mkdir()
    run_ranks("idle_rank", folder / "store", folder, wrong)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def of_one_rank(updates: int) -> tuple[dict[str, torch.Tensor], tuple[float, ...]]:
    """(weights after these updates more than one, losses of those together), by one rank that does all."""
    trainer = made(None)
    if updates:
        trainer.refresh(limit_s=1e9, clock=lambda: 0.0, max_updates=updates)
    weights = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    return weights, trainer.refresh(limit_s=1e9, clock=lambda: 0.0, max_updates=TOGETHER).losses


@pytest.mark.parametrize(("wrong", "kept"), [("", ALONE), ("fail", 0)])
def test_all_ranks_go_on_with_what_one_has_learned(tmp_path: Path, wrong: str, kept: int) -> None:
    weights, losses = of_one_rank(kept)
    ranks = idle_ranks(tmp_path / "ranks", wrong)
    assert [of["alone"] for of in ranks] == [[], [kept] if kept else []]
    assert [of["problems"] for of in ranks] == [[], [] if kept else ["out of memory"]]
    for rank, of in enumerate(ranks):
        adopted = load_file(tmp_path / "ranks" / f"adopted{rank}.safetensors")
        assert adopted.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(adopted[name], weight, atol=2e-5, rtol=1e-4)
        assert of["losses"] == pytest.approx(losses, abs=1e-5)
        assert (of["version"], of["updates"]) == (2 + (kept > 0), 1 + kept + TOGETHER)
    first, second = [load_file(tmp_path / "ranks" / f"adopted{rank}.safetensors") for rank in range(2)]
    assert all(torch.equal(first[name], second[name]) for name in weights)


def test_an_optimizer_that_is_left_behind_is_caught(tmp_path: Path) -> None:
    _, losses = of_one_rank(ALONE)
    ranks = idle_ranks(tmp_path / "forgot", "forget")
    assert ranks[0]["losses"][0] == pytest.approx(losses[0], abs=1e-5), "before the first step of the optimizer"
    assert ranks[0]["losses"][1] != pytest.approx(losses[1], abs=1e-5)


def test_it_stops_between_two_micro_batches_and_leaves_no_part_of_an_update() -> None:
    trainer, reference = made(None), made(None)
    asked: list[int] = []

    def over() -> bool:
        asked.append(trainer.updates)
        return len(asked) == 3

    stats = trainer.learn_alone(over, max_updates=100)
    assert (stats.micro_steps, stats.updates, trainer.version) == (2, asked[-1] - 1, 1 + (asked[-1] > 1))
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    if stats.updates:
        reference.refresh(limit_s=1e9, clock=lambda: 0.0, max_updates=stats.updates)
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), reference.model.parameters(), strict=True))
    assert trainer.tokens_per_update == cases.CONFIG.tokens_per_update, "that it was stopped says nothing of its time"


def test_without_lessons_there_is_nothing_to_do() -> None:
    trainer = DrafterTrainer(cases.config(), cases.model(), seed=0)
    assert trainer.learn_alone(lambda: False, max_updates=5).updates == 0


def test_what_was_learned_while_others_rolled_out_is_a_version(collective: Collective, draft_dir: Path) -> None:
    world = World(collective, draft_dir, idle=True, tokens_per_update=16)
    world.it.learn_alone(threading.Event())
    world.it.settle()
    assert world.step(1)["drafter/idle_updates"] == 0, "there was nothing to learn from"
    world.it.meanwhile(has_engines=False)(threading.Event())
    learn = world.it.meanwhile(has_engines=True)
    learn(threading.Event())
    world.it.settle()
    learn(threading.Event())
    world.it.settle()
    metrics = world.step(2)
    passes = metrics["drafter/idle_updates"] * 16 / metrics["drafter/buffer_tokens"]
    assert 0 < passes <= 1, "no more than the buffer holds"
    assert metrics["drafter/version"] == metrics["drafter/oldest_version"] == 3
    assert world.held() == world.weights()
    over = threading.Event()
    over.set()
    learn(over)
    world.it.settle()
    assert world.step(3)["drafter/idle_updates"] == 0


def test_what_diverged_while_others_rolled_out_is_said_and_forgotten(collective: Collective, draft_dir: Path) -> None:
    world = World(collective, draft_dir, idle=True, learning_rate=1e30, warmup_updates=0, max_updates=1)
    world.it.drafter.buffer.add(cases.lessons())
    before = world.weights()
    world.it.learn_alone(threading.Event())
    assert world.weights() == before
    world.it.settle()
    assert world.step(1)["drafter/idle_updates"] == 0
    assert "distillation.idle: rank 0 had to stop learning in this rollout" in world.notes[0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"idle": True}, "idle: got True, expected False with refresh off"),
        ({"idle": True, "refresh": "auto", "zero_stage": 1}, "idle: got True, expected False with ZeRO"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cases.config(**wrong)
