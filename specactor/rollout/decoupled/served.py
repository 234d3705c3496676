"""What an engine knows of its open requests, and of the drafters that they are with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specactor.rollout.decoupled.order import Numbering, Total
from specactor.rollout.decoupled.protocol import NO_SESSION, TailColumns


@dataclass(slots=True, eq=False)
class Request:
    """One open request."""

    number: int
    name: str
    prompt_ids: Sequence[int]
    output_ids: list[int]
    """The engine's own list; it grows."""
    seed: int
    temperature: float
    drafter: int | None = None
    told: int = 0
    """Output tokens that the drafter was told of."""
    owed_from: int | None = 0
    """It was told of much at once, up to here, and has not answered since."""
    opened_s: float = float("-inf")
    base: int = 0
    """Position of the tail's first token."""
    tokens: bytes | None = None
    """The tail, packed: a list of numbers is ten times as much to fetch after a verify. None: there is none."""


@dataclass(slots=True)
class Peer:
    """One drafter process, in whatever incarnation."""

    out: Numbering
    session: int = NO_SESSION
    """Of the incarnation that was heard last."""
    frame: int = 0
    """Number of its last frame."""
    live: bool = False
    asked_s: float | None = None
    """Since when a beat is unanswered."""
    beat_s: float = float("-inf")
    """When the last beat was sent."""
    others: int = 0
    """Requests of other engines there, as it said last."""
    requests: dict[int, Request] = field(default_factory=dict)
    unopened: dict[int, Request] = field(default_factory=dict)
    """Of those, the ones that it must be told of."""
    grown: dict[int, Request] = field(default_factory=dict)
    """Of those, the ones with new tokens."""
    closed: list[int] = field(default_factory=list)
    """Numbers that it need not hold any longer."""
    arrived: list[TailColumns] = field(default_factory=list)
    """Not looked into yet."""
    version: int = 0
    drafted: Total = field(default_factory=Total)
    wasted: Total = field(default_factory=Total)

    @property
    def load(self) -> int:
        return self.others + len(self.requests)
