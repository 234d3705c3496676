"""What is known of a drafter's acceptance is worth less once it drafts with new weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import pytest

from specactor.config import SpeculationConfig
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.speculator import Speculator
from tests.rollout.speculation.world import survival


class Learner(Drafter):
    name = "learner"
    held = 0

    @property
    def version(self) -> int:
        return self.held

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        return [[1] * window for window in windows]


@pytest.mark.parametrize(("versions", "changed"), [((0, 0, 0), 0), ((0, 1, 1), 1), ((3, 3, 5), 1), ((0, 1, 2), 2)])
def test_every_newer_version_gets_a_new_prior(versions: tuple[int, ...], changed: int) -> None:
    learner = Learner()
    speculator = Speculator(SpeculationConfig(mode="coupled", window=4), [learner], clock=time.perf_counter)
    known = speculator.estimates.acceptance["learner"]
    for _ in range(50):
        known.observe("r", 4, 0)
    before = survival(known, "r")[0]
    rates = [before]
    for version in versions:
        learner.held = version
        speculator.drafter_set.find()
        rates.append(survival(known, "r")[0])
    assert sum(later > earlier for earlier, later in pairwise(rates)) == changed, rates
