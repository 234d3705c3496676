"""Refreshes of the drafter that run out of time or diverge."""

from __future__ import annotations

import math

import pytest
import torch

from specactor.errors import SpecActorError
from specactor.trainer.drafter.train import DrafterTrainer
from specactor.trainer.drafter.updates import diverged
from tests.trainer.drafter import cases
from tests.trainer.drafter.train_cases import learn, trainer


class Slow(DrafterTrainer):
    """Its updates take three seconds each, on a clock that nothing else moves."""

    now_s = 0.0

    def _gradients(self) -> dict[str, float]:
        self.now_s += 3.0
        return super()._gradients()


@pytest.mark.parametrize(("limit_s", "updates"), [(0.0, 0), (1.0, 1), (6.0, 1), (7.5, 2), (9.5, 3)])
def test_an_update_is_begun_where_it_ends_in_time_and_the_first_in_any_case(limit_s: float, updates: int) -> None:
    made = Slow(cases.config(), cases.model(), seed=0)
    made.buffer.add(cases.examples())
    stats = made.refresh(limit_s=limit_s, clock=lambda: made.now_s)
    assert (stats.updates, made.updates, made.version) == (updates, updates, updates > 0)
    assert stats.seconds == 3 * updates
    on = learn(made, 1).losses
    assert stats.losses + on == learn(trainer(), updates + 1).losses


# --- what is not finite


def test_weights_that_the_last_update_broke_get_no_version() -> None:
    made = trainer(learning_rate=1e38)
    with pytest.raises(SpecActorError, match="got a weight of nan"):
        made.refresh(limit_s=1e9, clock=lambda: 0.0, max_updates=1, rate_of=lambda update: math.inf)
    assert made.version == 0


def test_updates_before_a_loss_that_is_not_finite_are_a_version() -> None:
    """They are in the weights, which are pushed and saved under its number."""
    made, one = trainer(), trainer()
    learn(one, 1)
    gradients, calls = made._gradients, iter([False, True, True])

    def once() -> dict[str, float]:
        if next(calls):
            raise diverged("loss", math.inf)
        return gradients()

    made._gradients = once  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(SpecActorError, match="got a loss of inf"):
            learn(made, 2)
        assert (made.version, made.updates) == (1, 1), "the second time nothing is learned before it"
        assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), one.model.parameters(), strict=True))


def test_updates_that_broke_the_weights_are_no_version_where_the_next_loss_says_so() -> None:
    made = trainer(learning_rate=1e38)
    with pytest.raises(SpecActorError, match="got a loss of nan"):
        made.refresh(limit_s=1e9, clock=lambda: 0.0, max_updates=2, rate_of=lambda update: math.inf)
    assert (made.version, made.updates) == (0, 1)


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
