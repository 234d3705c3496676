"""Refreshes of the drafter that run out of time or diverge: nothing of what was not finished is left."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specactor.errors import SpecActorError
from specactor.trainer.drafter.train import DrafterTrainer
from tests.trainer.drafter import cases
from tests.trainer.drafter.train_cases import learn, resumed, trainer


class Slow(DrafterTrainer):
    """Its micro-batches take a second each, on a clock that nothing else moves."""

    now_s = 0.0

    def _loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        self.now_s += 1.0
        return super()._loss(batch)


@pytest.mark.parametrize("limit_s", [0.0, 1.0, 7.5, 9.0, 10.0])
def test_it_stops_in_time_and_forgets_half_an_update(limit_s: float) -> None:
    made = Slow(cases.config(), cases.model(), seed=0)
    made.buffer.add(cases.examples())
    stats = made.refresh(limit_s=limit_s, clock=lambda: made.now_s)
    assert stats.stopped == "time"
    assert max(1.0, limit_s) - 1 < stats.seconds <= max(1.0, limit_s), "only of the first is it not known how long"
    assert stats.micro_steps == made.now_s
    assert made.updates == stats.updates
    assert made.version == (stats.updates > 0)
    made.halvings = 0
    on = learn(made, 1).losses
    assert stats.losses + on == learn(trainer(), stats.updates + 1).losses, "half an update leaves no gradients"


def test_a_refresh_knows_from_the_last_how_long_a_micro_batch_takes() -> None:
    made = Slow(cases.config(), cases.model(), seed=0)
    made.buffer.add(cases.examples())
    assert made.refresh(limit_s=0.5, clock=lambda: made.now_s).micro_steps == 1
    assert made.refresh(limit_s=0.5, clock=lambda: made.now_s).micro_steps == 0
    assert made.refresh(limit_s=1.0, clock=lambda: made.now_s).micro_steps == 1


def test_an_update_of_fewer_tokens_has_a_lower_rate() -> None:
    """Or the noise of single responses unlearns what a good draft model knows."""
    made = trainer(warmup_updates=1, learning_rate=1e-2)
    rates = []
    for halvings in (0, 2, 6):
        made.halvings = halvings
        learn(made, 1)
        rates.append(made._updater._adam.param_groups[0]["lr"])  # type: ignore[attr-defined]
    assert rates == pytest.approx([1e-2, 5e-3, 1.25e-3])


def test_one_slow_micro_batch_does_not_end_all_refreshes() -> None:
    made = Slow(cases.config(), cases.model(), seed=0)
    made.buffer.add(cases.examples())
    made._micro_s = 7.0  # of a first one, which compiled
    steps = [made.refresh(limit_s=2.0, clock=lambda: made.now_s).micro_steps for _ in range(4)]
    assert steps[:2] == [0, 0]
    assert steps[2] > 0
    assert steps[3] > 0


def test_an_update_that_never_fits_becomes_smaller_and_grows_again(tmp_path: Path) -> None:
    made = Slow(cases.config(), cases.model(), seed=0)
    made.buffer.add(cases.examples())
    small, drawn = [], []
    for _ in range(6):
        drawn.append(made.tokens_per_update)
        small.append(made.refresh(limit_s=2.0, clock=lambda: made.now_s))
    assert small[0].updates == 0
    assert drawn[:2] == [120, 60]
    assert drawn == sorted(drawn, reverse=True), "two updates that fit are no reason to grow, since one of both may not"
    assert any(stats.updates for stats in small)
    made.save(tmp_path)
    assert resumed(tmp_path).tokens_per_update == made.tokens_per_update < 120
    for _ in range(8):
        stats = made.refresh(limit_s=40.0, clock=lambda: made.now_s)
        assert stats.updates
    assert made.tokens_per_update == 120


# --- what is not finite


def test_divergence_after_some_updates_leaves_the_weights_before_all_of_them() -> None:
    made, other = trainer(), trainer()
    learn(made, 1)
    learn(other, 1)
    kept = [p.detach().clone() for p in made.model.parameters()]
    calls = itertools.count()
    hook = made.model.lm_head.weight.register_hook(lambda gradient: gradient * (torch.inf if next(calls) > 8 else 1.0))
    with pytest.raises(SpecActorError, match="expected a finite number"):
        learn(made, 20)
    hook.remove()
    assert made.updates > 2, "some were made"
    assert made.version == 1
    assert all(torch.equal(a, b) for a, b in zip(kept, made.model.parameters(), strict=True))
    made.updates = other.updates
    assert learn(made, 2).losses == learn(other, 2).losses, "the optimizer is the one before, too"


def test_weights_that_the_last_update_broke_get_no_version() -> None:
    made = trainer(learning_rate=1e38)
    kept = [p.detach().clone() for p in made.model.parameters()]
    with pytest.raises(SpecActorError, match="got a weight of nan"):
        made.refresh(limit_s=1e9, clock=lambda: 0.0, max_updates=1, rate_of=lambda update: math.inf)
    assert made.version == 0
    assert all(torch.equal(a, b) for a, b in zip(kept, made.model.parameters(), strict=True))


def test_what_is_not_finite_changes_nothing() -> None:
    made = trainer()
    learn(made, 1)
    kept = [p.detach().clone() for p in made.model.parameters()]
    hook = made.model.lm_head.weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(SpecActorError, match=r"got a gradient norm of (inf|nan), expected a finite number\. Lower"):
        learn(made, 1)
    hook.remove()
    assert all(torch.equal(a, b) for a, b in zip(kept, made.model.parameters(), strict=True))
    with torch.no_grad():
        made.model.lm_head.weight[3] = torch.nan
    with pytest.raises(SpecActorError, match="got a loss of nan"):
        learn(made, 1)
