"""The drafters `decoupled`, `decoupled:2`, ..: drafts of other processes.

Invariant: nothing blocks. A round takes the drafts that are there.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence

from specactor.rollout.decoupled.engine_side import Tails
from specactor.rollout.decoupled.transport import Address, ZmqLink, new_session
from specactor.rollout.speculation.drafter import Drafter, DraftSequence


class Decoupled(Drafter):
    """Drafts of other processes. Call `stop` in the end, or let the object go."""

    drafts_ahead = True

    def __init__(
        self,
        session: int,
        link: ZmqLink,
        *,
        engine: str,
        window: int,
        clock: Callable[[], float] = time.monotonic,
        name: str = "decoupled",
    ) -> None:
        self.name = name
        self.tails = Tails(session, engine=engine, num_drafters=link.num_drafters, window=window)
        self._link = link
        self._clock = clock
        self.proposed = 0  # draft tokens handed to the engine
        self._reported: dict[str, float] = {}  # figures as of the last call
        self._finalizer = weakref.finalize(self, link.close)

    @property
    def version(self) -> int:
        return self.tails.version

    def is_there(self) -> bool:
        """Return whether any drafter answers; a silent one is asked by beats alone."""
        if not self.tails.live:
            now_s = self._clock()
            self.expects = self._send(now_s)
            self._receive(now_s)
        return bool(self.tails.live)

    def open(self, sequence: DraftSequence) -> None:
        self.tails.open(
            sequence.request_id, sequence.prompt_ids, sequence.output_ids, sequence.seed, sequence.temperature
        )

    def close(self, sequence: DraftSequence) -> None:
        self.tails.close(sequence.request_id)
        self._send(self._clock())  # there may be no next round

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        now_s = self._clock()
        names = [sequence.request_id for sequence in sequences]
        self.tails.commit(names)
        self._send(now_s)
        self._receive(now_s)
        drafts = self.tails.drafts(names, windows)
        self.expects = self._expects(names, drafts)
        self.proposed += sum(map(len, drafts))
        return drafts

    def figures(self) -> dict[str, float]:
        dropped = self.tails.drops.counts  # "nobody": beats to drafters that do not answer, all that sleep among them
        now: dict[str, float] = {
            "drafted_ahead": self.tails.drafted,
            "wasted_ahead": self.tails.wasted,
            "stale_tails": dropped["stale"],
            "dropped_frames": dropped.total() - sum(dropped[reason] for reason in ("stale", "late", "nobody")),
        }
        before, self._reported = self._reported, now
        fresh = {name: float(value - before.get(name, 0)) for name, value in now.items()}
        return fresh | {"live_drafters": len(self.tails.live)}

    def stop(self) -> None:
        if self._finalizer.alive:
            self.tails.close_all()
            self._send(self._clock())
            self._finalizer()

    def _expects(self, names: Sequence[str], drafts: Sequence[Sequence[int]]) -> bool:
        if 2 * drafts.count([]) <= len(names):
            return False
        without = [name for name, draft in zip(names, drafts, strict=True) if not draft]
        return 2 * self.tails.num_owed(without) > len(names)

    def _send(self, now_s: float) -> bool:
        """Return whether anybody was sent anything."""
        is_sent = False
        for drafter in range(self._link.num_drafters):
            for frame in self.tails.outgoing(drafter, now_s):
                if self._link.send(drafter, frame):
                    is_sent = True
                else:
                    self.tails.drops.expect("unsent" if drafter in self.tails.live else "nobody")
        return is_sent

    def _receive(self, now_s: float) -> None:
        self.tails.receive(self._link.receive(), now_s)
        self.tails.tick(now_s)


def connect(drafters: Sequence[Address], *, engine: str, window: int, name: str = "decoupled") -> Decoupled:
    """Connect to drafters, which may come later. `engine` is a name that no other engine has, and the same after a
    restart."""
    session = new_session()
    return Decoupled(session, ZmqLink(session, drafters), engine=engine, window=window, name=name)
