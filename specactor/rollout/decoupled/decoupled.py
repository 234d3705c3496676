"""The drafter `decoupled`: what processes of their own have drafted for this engine's requests.

For the engine it is one more draft method. `open` and `close` become messages; `propose` tells of the tokens that are
new, and returns what has arrived. A round never waits for a drafter, but for as long as measured rounds say that
waiting wins (`patience`).

Invariants: what drafters send, or do not send, changes speed and never a token; nothing here blocks.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import sub

from specactor.rollout.decoupled.patience import Patience
from specactor.rollout.decoupled.tails import Tails
from specactor.rollout.decoupled.transport import EngineKeys, Link, ZmqLink, new_session
from specactor.rollout.draft.drafter import Drafter, DraftSequence

_LONGEST_ROUND_S = 1.0
"""What takes longer between two rounds was something else."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What happened since the start."""

    drafters: int
    """That answer now."""
    version: int
    """Oldest weights among them."""
    proposed: int
    """Draft tokens handed to the engine."""
    branched: int
    """Times that a branch of a tail was right where the tail was not."""
    drafted_ahead: int
    """Tokens that drafters drafted for this engine, as they say."""
    wasted_ahead: int
    """Of them, thrown away before or after they were sent."""
    waited_s: float
    """In rounds, for drafts."""
    waits: int
    dropped: dict[str, int]
    """Frames and tails, by reason: `stale`, `late`, `future`, `repeated`, `foreign`, `malformed`, `unsent`; and to
    `nobody`, a drafter that does not answer, as every beat to one that sleeps; ..."""


class Decoupled(Drafter):
    """Call `stop` in the end; else it happens when the object goes."""

    name = "decoupled"
    drafts_ahead = True

    def __init__(
        self,
        session: int,
        link: Link,
        *,
        engine: str,
        window: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Use `connect`."""
        self.tails = Tails(session, engine=engine, num_drafters=link.num_drafters, window=window)
        self.patience = Patience()
        self._link = link
        self._clock = clock
        self._given: list[list[int]] = []
        """Outputs of the requests that got a draft in the last round."""
        self._lengths: list[int] = []
        """Which they had."""
        self._ended_s: float | None = None
        self._proposed = 0
        self._waited_s = 0.0
        self._waits = 0
        self._told: dict[str, float] = {}
        """Figures as of the last call."""
        self._finalizer = weakref.finalize(self, link.close)

    @property
    def version(self) -> int:
        return self.tails.version

    def is_there(self) -> bool:
        """Whether any drafter answers. One that did not is asked by a beat, and by nothing else."""
        if not self.tails.live:
            now_s = self._clock()
            self._send(now_s)
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
        self._learn(now_s)
        self.tails.commit(names)
        self._send(now_s)
        self._receive(now_s)
        drafts = self.tails.drafts(names, windows)
        self._wait_for(names, windows, drafts)
        without = [name for name, draft in zip(names, drafts, strict=True) if not draft]
        self.expects = 2 * len(without) > len(names) and 2 * self.tails.num_owed(without) > len(names)
        self._given = [s.output_ids for s, draft in zip(sequences, drafts, strict=True) if draft]
        self._lengths = list(map(len, self._given))
        self._proposed += sum(map(len, drafts))
        self._ended_s = self._clock()
        return drafts

    def report(self) -> Report:
        tails = self.tails
        return Report(
            drafters=len(tails.live),
            version=tails.version,
            proposed=self._proposed,
            branched=tails.branched,
            drafted_ahead=tails.drafted,
            wasted_ahead=tails.wasted,
            waited_s=self._waited_s,
            waits=self._waits,
            dropped=dict(tails.drops.counts),
        )

    def figures(self) -> dict[str, float]:
        report = self.report()
        ordinary = sum(report.dropped.get(reason, 0) for reason in ("stale", "late", "nobody"))
        now: dict[str, float] = {
            "waited_s": report.waited_s,
            "branched": report.branched,
            "drafted_ahead": report.drafted_ahead,
            "wasted_ahead": report.wasted_ahead,
            "stale_tails": report.dropped.get("stale", 0),
            "dropped_frames": sum(report.dropped.values()) - ordinary,
        }
        before, self._told = self._told, now
        fresh = {name: value - before.get(name, 0) for name, value in now.items()}
        fresh = {name: now[name] if value < 0 else value for name, value in fresh.items()}  # a drafter began anew
        return fresh | {"live_drafters": report.drafters}

    def stop(self) -> None:
        """Tell the drafters that all is over, and disconnect."""
        if self._finalizer.alive:
            self.tails.close_all()
            self._send(self._clock())
            self._finalizer()

    def _learn(self, now_s: float) -> None:
        """From the round that has ended."""
        counts = map(sub, map(len, self._given), self._lengths)
        self.patience.emitted([count for count in counts if count > 0])
        if self._ended_s is not None and now_s - self._ended_s < _LONGEST_ROUND_S:
            self.patience.rounds(now_s - self._ended_s)

    def _send(self, now_s: float) -> None:
        for drafter in range(self._link.num_drafters):
            for frame in self.tails.outgoing(drafter, now_s):
                if not self._link.send(drafter, frame):
                    self.tails.drops.expect("unsent" if drafter in self.tails.live else "nobody")

    def _receive(self, now_s: float) -> None:
        tails = self.tails
        tails.receive(self._link.receive(), now_s)
        tails.tick(now_s)
        if tails.waits_s:
            self.patience.answers(tails.waits_s)
            tails.waits_s.clear()

    def _wait_for(self, names: Sequence[str], windows: Sequence[int], drafts: list[list[int]]) -> None:
        """Put drafts that come while waiting for them pays into `drafts`."""
        missing = [i for i, window in enumerate(windows) if window and not drafts[i]]
        if not missing or not self.tails.live:
            return
        wait_s, expected = self.patience.bound(len(names), len(missing))
        if wait_s <= 0:
            return
        began_s = now_s = self._clock()
        before = len(missing)
        while missing and (left_s := began_s + wait_s - now_s) > 0 and self._link.wait(left_s):
            now_s = self._clock()
            self._receive(now_s)
            found = self.tails.drafts([names[i] for i in missing], [windows[i] for i in missing])
            for i, draft in zip(missing, found, strict=True):
                drafts[i] = draft
            missing = [i for i in missing if not drafts[i]]
        self.patience.kept(expected, before - len(missing))
        ended_s = self._clock()
        self.recorder.span("rounds", "wait for drafts", began_s, ended_s, missing=before, arrived=before - len(missing))
        self._waited_s += ended_s - began_s
        self._waits += 1


def connect(endpoints: Sequence[str], *, engine: str, window: int, keys: EngineKeys | None = None) -> Decoupled:
    """To drafters at these endpoints, which need not be there yet.

    Args: a name of the engine that no other engine has, the same after a restart; the most draft tokens of a verify.
    """
    session = new_session()
    return Decoupled(session, ZmqLink(session, endpoints, keys=keys), engine=engine, window=window)
