"""Pools of engines that hand out the requests of a planned layout with one mistake each."""

from __future__ import annotations

from collections.abc import Sequence

from specactor.rollout.assignment import assign
from specactor.rollout.pool import EnginePool
from specactor.rollout.sglang.engine import Engine
from specactor.types import RolloutRequest

Parts = tuple[list[list[RolloutRequest]], tuple[int, ...]]


class DropsAPart(EnginePool):
    """Requests are spread over all engines, and nobody has those of an engine that is set aside."""

    def _parts(self, requests: Sequence[RolloutRequest], alive: Sequence[Engine]) -> Parts:
        _, aside = super()._parts(requests, alive)
        return [[] if i in aside else part for i, part in enumerate(assign(requests, len(alive)))], aside


class GivesTwice(EnginePool):
    """The same, and another engine has those too."""

    def _parts(self, requests: Sequence[RolloutRequest], alive: Sequence[Engine]) -> Parts:
        right, aside = super()._parts(requests, alive)
        parts = assign(requests, len(alive))
        return [parts[i] if i in aside else part for i, part in enumerate(right)], aside


class TheFirstServe(EnginePool):
    """Whichever engines are set aside."""

    def _parts(self, requests: Sequence[RolloutRequest], alive: Sequence[Engine]) -> Parts:
        parts, aside = super()._parts(requests, alive)
        return sorted(parts, key=lambda part: not part), aside


class TheOthersDraft(EnginePool):
    """Drafters are woken on the devices of engines that serve."""

    def _parts(self, requests: Sequence[RolloutRequest], alive: Sequence[Engine]) -> Parts:
        parts, aside = super()._parts(requests, alive)
        return parts, tuple(i for i in range(len(alive)) if i not in aside)[: len(aside)]


class PlacesForNumbers(EnginePool):
    """After an engine has died, those behind it are taken for others."""

    def _parts(self, requests: Sequence[RolloutRequest], alive: Sequence[Engine]) -> Parts:
        parts, aside = super()._parts(requests, alive)
        return parts, tuple(min(alive[i].index, len(alive) - 1) for i in aside)
