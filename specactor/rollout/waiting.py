"""Groups wait for room in their engine, and go to whichever rank, of any host, has room first. Ranks know all requests:
only counts travel, through the launcher's store.

Invariants: a group is taken once, and whole; a rank takes its own first; what nobody took is its first rank's; who
takes it changes no token.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specactor.types import RolloutRequest

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Group = list[RolloutRequest]


def held_back(requests: Sequence[RolloutRequest], *, engines: int, slots: int) -> dict[int, list[Group]]:
    """Return, by engine, the groups that find its `slots` taken; none for one engine. Group i is meant for engine i %
    `engines`, which is filled first."""
    groups: dict[int, Group] = {}
    for request in requests:
        groups.setdefault(request.group_id, []).append(request)
    sent, waiting = Counter[int](), defaultdict[int, list[Group]](list)
    for group_id, group in groups.items() if engines > 1 else ():
        engine = group_id % engines
        if sent[engine] < slots:
            sent[engine] += len(group)
        else:
            waiting[engine].append(group)
    return dict(waiting)


@dataclass(kw_only=True)
class Waiting:
    """What waits in one rollout, as one rank sees it."""

    lists: Mapping[int, Sequence[Group]]
    """By engine of the job. Its own rank takes from the front, others from the end, once their own lists are empty."""
    own: Collection[int]  # engines of this rank
    slots: int  # requests that an engine runs at once
    store: Store
    prefix: str
    begin: Callable[[Sequence[RolloutRequest]], object] = lambda requests: None  # sees requests before they are given
    num_moved: int = 0  # groups that this rank took of others
    _fronts: Counter[int] = field(default_factory=Counter)  # groups taken from the front of each of this rank's lists
    _over: set[int] = field(default_factory=set)  # lists that are known to be empty

    def without(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        """Return the requests that are sent at once."""
        late = {group[0].group_id for groups in self.lists.values() for group in groups}
        return [request for request in requests if request.group_id not in late]

    @property
    def is_over(self) -> bool:
        return len(self._over) >= len(self.lists)

    def take(self, running: int) -> Group:
        """Return a group for an engine that runs so many requests; empty without one, or room."""
        room = self.slots - running
        if room <= 0 or self.is_over:
            return []
        for engine in self.own:
            if self._is_granted(engine):
                self._fronts[engine] += 1
                return self._given(self.lists[engine][self._fronts[engine] - 1])
        size = len(next(iter(self.lists.values()))[0])
        if running and size > room:  # another rank may have room for all of a group earlier
            return []
        # Those behind its own come first, so that ranks begin at different lists.
        for engine in sorted(self.lists, key=lambda engine: (engine < min(self.own, default=0), engine)):
            if engine not in self.own and self._is_granted(engine):
                self.num_moved += 1
                return self._given(self.lists[engine][-self._add(f"{engine}/end", 1)])
        return []

    def left(self) -> list[RolloutRequest]:
        """Return what nobody took of this rank's lists, since engines died, and delete their counts, when all ranks are
        done."""
        found: list[RolloutRequest] = []
        for engine in set(self.own) & self.lists.keys():
            groups = self.lists[engine]
            end = len(groups) - self._add(f"{engine}/end", 0)
            found += [request for group in groups[self._fronts[engine] : end] for request in group]
            for name in ("taken", "end"):
                self.store.delete_key(f"{self.prefix}/{engine}/{name}")
        self.lists = {}
        return self._given(found)

    def _given(self, requests: Group) -> Group:
        self.begin(requests)
        return requests

    def _is_granted(self, engine: int) -> bool:
        """Count another group as taken, if one is left."""
        # both ends share one count, so they never meet in a group
        if engine in self._over or engine not in self.lists:
            return False
        if self._add(f"{engine}/taken", 1) <= len(self.lists[engine]):
            return True
        self._over.add(engine)
        return False

    def _add(self, name: str, amount: int) -> int:
        return self.store.add(f"{self.prefix}/{name}", amount)
