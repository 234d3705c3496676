"""What an engine is shown of its verifies teaches it what as many real ones would."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from specactor.rollout.speculation.acceptance import AcceptanceModel
from specactor.simulator.engine import Decision, Engine, show
from specactor.simulator.requests import COUPLED, Floats, Ints, Round
from tests.simulator.small import W, candidates
from tests.simulator.test_decide import decider

WINDOWS = (W, W, 1, 0, 2, 0, W, W)
RIGHT = (W, 0, W, W, 1, 0, 2, W)  # draft tokens of each request that are right, always
ROUNDS = 3
Numbers = list[int]


def shown() -> AcceptanceModel:
    n = len(WINDOWS)
    engine = Engine(0, candidates().verifiers[0], decider(), 1.0)
    engine.running = np.arange(10, 10 + n)
    engine.decision = Decision(drafter="small", modes=np.full(n, COUPLED), windows=np.array(WINDOWS))
    none_B = np.zeros(n)
    engine.round = Round(seconds=0.01, tokens=none_B, drafted=none_B, variance=none_B, most=none_B)
    engine.rounds = float(ROUNDS)

    def survivals(which: Ints, method: str) -> Floats:
        assert method == "small"
        return (np.arange(W + 1) < np.array(RIGHT)[which - 10, None]).astype(float)

    show(engine, survivals, str, np.random.default_rng(0), max_window=W)
    return engine.decider.acceptance["small"]


def by_hand(change: Callable[[Numbers, Numbers], tuple[Numbers, Numbers]], rounds: int = ROUNDS) -> AcceptanceModel:
    """Rounds of those that have windows."""
    model = decider().acceptance["small"]
    drafting = [i for i, window in enumerate(WINDOWS) if window]
    asked, accepted = change([WINDOWS[i] for i in drafting], [min(WINDOWS[i], RIGHT[i]) for i in drafting])
    for _ in range(rounds):
        model.observe_all([str(10 + i) for i in drafting], asked, accepted, asked=asked)
    return model


def known(model: AcceptanceModel) -> Floats:
    names = [str(10 + i) for i in range(len(WINDOWS))]
    return np.array([*model.survivals(names, covered=True), *model.survivals(names, covered=False)])


def test_an_engine_is_shown_its_verifies_by_rounds() -> None:
    assert (known(shown()) == known(by_hand(lambda asked, accepted: (asked, accepted)))).all()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda asked, accepted: (asked, [0] * len(asked)),
        lambda asked, accepted: ([W] * len(asked), accepted),
        lambda asked, accepted: (asked[::-1], accepted[::-1]),
    ],
    ids=["nothing accepted", "one window for all", "of another request"],
)
def test_other_verifies_are_told_apart(wrong: Callable[[Numbers, Numbers], tuple[Numbers, Numbers]]) -> None:
    assert (known(shown()) != known(by_hand(wrong))).any()


def test_as_many_verifies_as_rounds_are_shown() -> None:
    assert (known(shown()) != known(by_hand(lambda asked, accepted: (asked, accepted), ROUNDS - 1))).any()
