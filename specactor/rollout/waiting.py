"""Groups that wait because the engines that they are meant for are full, for whichever rank has room first.

Every rank knows all requests of a rollout, so a group moves by counting: a rank that takes one says so in the
launcher's store, and nothing else travels. An engine's list is taken by its own rank from the front, and by others,
once their own lists are empty, from the end.

Invariants: a group is taken once, and whole; a rank's own groups are never refused to it while others have not taken
them; what nobody has taken in the end is its first rank's; tokens do not depend on who takes a group, since noise is
keyed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from specactor.rollout.refill import Store
from specactor.types import RolloutRequest

Group = list[RolloutRequest]

MAX_ASKED = 16
"""Lists of other ranks that one with room looks at before it takes from the longest."""


def held_back(requests: Sequence[RolloutRequest], *, engines: int, slots: int) -> dict[int, list[Group]]:
    """Return the groups that wait, by engine; none where there is one engine. PURE.

    Group i is meant for engine i modulo `engines`, which is sent groups until each of its `slots` has a request.
    """
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
    """What waits in one rollout; every rank has one."""

    lists: Mapping[int, Sequence[Group]]
    """By engine of the job."""
    own: Collection[int]
    """Engines of this rank."""
    slots: int
    """Requests that an engine runs at once."""
    store: Store | None
    """None where there is one rank."""
    prefix: str
    begin: Callable[[Sequence[RolloutRequest]], object] = lambda requests: None
    """Sees requests before they are given."""
    num_moved: int = 0
    """Groups that this rank took of others."""
    _fronts: Counter[int] = field(default_factory=Counter)
    """Groups taken from the front of this rank's lists."""
    _over: set[int] = field(default_factory=set)
    """Lists that are known to be empty."""
    _alone: Counter[str] = field(default_factory=Counter)
    """The counts, without a store."""

    def without(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        """Return those that are sent at once."""
        late = {group[0].group_id for groups in self.lists.values() for group in groups}
        return [request for request in requests if request.group_id not in late]

    @property
    def is_over(self) -> bool:
        """Return whether there is nothing to take any more."""
        return len(self._over) >= len(self.lists)

    def take(self, running: int) -> Group:
        """Return a group for an engine of this rank that has so many requests, or none."""
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
        while (longest := self._longest()) is not None:
            if self._is_granted(longest):
                self.num_moved += 1
                return self._given(self.lists[longest][-self._add(f"{longest}/end", 1)])
        return []

    def left(self) -> list[RolloutRequest]:
        """Return what nobody has taken of this rank's lists, because engines died, and take their counts out of the
        store. Call it once, when all ranks are done."""
        found: list[RolloutRequest] = []
        for engine in set(self.own) & self.lists.keys():
            groups = self.lists[engine]
            end = len(groups) - self._add(f"{engine}/end", 0)
            found += [request for group in groups[self._fronts[engine] : end] for request in group]
            if self.store is not None:
                for name in ("taken", "end"):
                    self.store.delete_key(f"{self.prefix}/{engine}/{name}")
        self.lists = {}
        return self._given(found)

    def _given(self, requests: Group) -> Group:
        self.begin(requests)
        return requests

    def _is_granted(self, engine: int) -> bool:
        """Count one more group of a list as taken. As many are granted as there are, from both ends together, so the
        ends never meet in one group."""
        if engine in self._over or engine not in self.lists:
            return False
        if self._add(f"{engine}/taken", 1) <= len(self.lists[engine]):
            return True
        self._over.add(engine)
        return False

    def _longest(self) -> int | None:
        """Return which of the next lists of others, from this rank's engines on, has the most groups left, if any."""
        around = sorted(self.lists, key=lambda engine: (engine < min(self.own, default=0), engine))
        while asked := [e for e in around if e not in self._over and e not in self.own][:MAX_ASKED]:
            left = {e: len(self.lists[e]) - self._add(f"{e}/taken", 0) for e in asked}
            self._over |= {e for e, count in left.items() if count <= 0}
            if max(left.values()) > 0:
                return max(left, key=lambda e: left[e])
        return None

    def _add(self, name: str, amount: int) -> int:
        if self.store is None:
            self._alone[name] += amount
            return self._alone[name]
        return self.store.add(f"{self.prefix}/{name}", amount)
