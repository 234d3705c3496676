"""Dynamic sampling: a group that nothing is learned from is replaced at once, by the next problem. The first that
teach, in the order of the data, are kept.

Invariants: a verdict is final; ranks with equal verdicts draw and keep the same, at any speed; what is drawn only
grows; without ``rollout.oversample`` nothing needless is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specactor.types import Problem, RolloutRequest, Trajectory

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(kw_only=True)
class Refill:
    want: int  # groups to keep
    ahead: int  # groups at work at first, `want` or more
    most: int  # groups drawn at most
    size: int  # responses of a group
    requests_of: Callable[[int], Sequence[RolloutRequest]]  # by the group's number
    problem_of: Callable[[RolloutRequest | Trajectory], Problem]
    teaches: Callable[[int, Sequence[Trajectory]], tuple[bool, float]]
    """Of a group: whether something is learned from it, and its success rate, nan where it failed."""
    store: Store  # holds, under `prefix`, a list that all ranks append to
    prefix: str
    begin: Callable[[Sequence[RolloutRequest]], None] = lambda requests: None  # sees requests before they are given
    when_scored: Callable[[Trajectory, Callable[[], None]], None] = lambda response, then: then()
    """Calls the second, maybe in another thread, when the first can be judged."""
    is_own: Callable[[int], bool] = lambda number: True  # whether this rank's engines generate the group
    attempt: int = 0  # times that lost engines were started again
    given: int = 0  # groups of which this rank has taken, or left to others, the requests
    finished: dict[int, list[Trajectory]] = field(default_factory=dict)
    known: dict[int, bool] = field(default_factory=dict)  # whether each group with a verdict is kept
    rates: dict[int, float] = field(default_factory=dict)  # their success rates
    _left: set[int] = field(default_factory=set)  # attempts in which a rank could not go on
    _num_read: int = 0  # of the list, by this rank
    _own: list[str] = field(default_factory=list)  # keys that it has written

    def _tell(self, text: str) -> None:
        key = f"{self.prefix}/{self.store.add(f'{self.prefix}/n', 1)}"
        self.store.set(key, text)
        self._own.append(key)

    def read(self) -> None:
        count = self.store.add(f"{self.prefix}/n", 0)
        while self._num_read < count:
            who, what, *rate = self.store.get(f"{self.prefix}/{self._num_read + 1}").decode().split(":")
            self._num_read += 1
            if who == "left":
                self._left.add(int(what))
            else:
                self.known[int(who)], self.rates[int(who)] = what == "1", float(rate[0])

    def forget(self) -> None:
        """Delete this rank's keys, and the counter, once all ranks have read them."""
        for key in (*self._own, f"{self.prefix}/n"):
            self.store.delete_key(key)

    @property
    def kept(self) -> list[int] | None:
        """The groups to learn from, once known; fewer than wanted where `most` were drawn."""
        found: list[int] = []
        for number in range(self.most):
            if len(found) == self.want or number not in self.known:
                break
            found += [number] if self.known[number] else []
        else:
            return found
        return found if len(found) == self.want else None

    @property
    def drawn(self) -> int:
        """Return how many groups are, or were, at work."""
        return min(self.most, self.ahead + sum(not kept for kept in self.known.values()))

    def more(self) -> list[RolloutRequest]:
        """Return the requests drawn since the last call, for this rank's engines."""
        self.read()
        start, self.given = self.given, self.given if self.kept is not None else max(self.given, self.drawn)
        new = [r for number in range(start, self.given) if self.is_own(number) for r in self.requests_of(number)]
        self.begin(new)
        return new

    def done(self, response: Trajectory) -> None:
        """Judge the group of a scored response, if it is whole."""
        of_group = self.finished.setdefault(response.group_id, [])
        of_group.append(response)
        if len(of_group) == self.size:
            kept, rate = self.teaches(response.group_id, of_group)
            self._tell(f"{response.group_id}:{int(kept)}:{rate!r}")
            self.read()

    def leave(self) -> None:
        """Tell others that this rank cannot go on before all meet."""
        self._tell(f"left:{self.attempt}")

    @property
    def is_over(self) -> bool:
        """Return whether idle ranks may stop waiting."""
        return self.kept is not None or self.attempt in self._left
