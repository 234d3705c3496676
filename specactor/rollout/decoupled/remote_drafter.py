"""The drafters `decoupled`, `decoupled:2`, ..: drafts of other processes.

Invariant: nothing blocks, but for a wait that should pay (`Patience`).
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from specactor.rollout.decoupled.engine_side import Tails
from specactor.rollout.decoupled.transport import Address, ZmqLink, new_session
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.verification import common

MAX_JUDGED = 8  # drafts compared at a time with what is emitted; of more, others in every round


MIN_GAIN = 1.05
MIN_SAMPLES = 16
MAX_SAMPLES = 64
MAX_WAIT_S = 0.05
LINK_S = 2e-4  # from a commit to the drafter and from its answer to here
_MEMORY = 0.98  # weight of what was, per round
_FORGIVENESS = 1.002  # per round without a wait: trust grows again


class Patience:
    """How long a round waits: w of largest (E + T m F(w) g) / (R + w), if over 1.05 E / R; E: tokens without waiting;
    T: trust; m: requests without drafts; F: share answered within w; g: P(first token right); R: median round in
    seconds."""

    def __init__(self) -> None:
        self._rounds_s: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._answers_s: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._served = 0.0
        self._first_right = 0.0
        self._accepted = 0.0
        self._trust = 1.0

    def rounds(self, round_s: float) -> None:
        self._rounds_s.append(round_s)

    def answers(self, answers_s: Iterable[float]) -> None:
        """Add the seconds from commits to the next drafts."""
        self._answers_s.extend(answers_s)

    def judged(self, right: Sequence[int]) -> None:
        served = len(right)
        if served:
            self._served = _MEMORY * self._served + served
            self._first_right = _MEMORY * self._first_right + served - right.count(0)
            self._accepted = _MEMORY * self._accepted + sum(right)

    def kept(self, expected: float, arrived: int) -> None:
        self._trust += 0.1 * (min(1.0, arrived / max(expected, 1e-9)) - self._trust)

    def bound(self, requests: int, missing: int) -> tuple[float, float]:
        """Return the seconds to wait at most, and how many drafts should arrive."""
        self._trust = min(1.0, _FORGIVENESS * self._trust)
        enough = min(len(self._rounds_s), len(self._answers_s), self._served) >= MIN_SAMPLES
        if not missing or not enough:
            return 0.0, 0.0
        gain = self._first_right / self._served
        emitted = requests + (requests - missing) * self._accepted / self._served
        if emitted + self._trust * missing * gain <= MIN_GAIN * emitted:
            return 0.0, 0.0  # not even if all answers took no time
        round_s, answers_s = median(self._rounds_s), sorted(self._answers_s)
        best, best_speed = (0.0, 0.0), MIN_GAIN * emitted / round_s
        for count, answer_s in enumerate(answers_s, 1):
            wait_s = answer_s + LINK_S
            if wait_s > MAX_WAIT_S:
                break
            arriving = self._trust * missing * count / len(answers_s)
            speed = (emitted + arriving * gain) / (round_s + wait_s)
            if speed > best_speed:
                best, best_speed = (wait_s, arriving), speed
        return best


class Decoupled(Drafter):
    """Call `stop` in the end, or let the object go."""

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
        self.patience = Patience()
        self._link = link
        self._clock = clock
        self._given: dict[str, tuple[list[int], int, list[int]]] = {}  # request -> (its output, that length, the draft)
        self._round = 0
        self.proposed = 0  # draft tokens handed to the engine
        self.waits = 0
        self.waited_s = 0.0
        self._wait_s = 0.0
        self._reported: dict[str, float] = {}  # figures as of the last call
        self._finalizer = weakref.finalize(self, link.close)

    @property
    def version(self) -> int:
        return self.tails.version

    def is_there(self) -> bool:
        """Return whether any drafter answers; a silent one is asked by beats alone."""
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
        self._given.pop(sequence.request_id, None)
        self._send(self._clock())  # there may be no next round

    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        now_s = self._clock()
        names = [sequence.request_id for sequence in sequences]
        self._learn()
        self.tails.commit(names)
        self._send(now_s)
        self._receive(now_s)
        drafts = self.tails.drafts(names, windows)
        self._wait_s = self._wait_for(names, windows, drafts) if self.may_wait else 0.0
        self.expects = self._expects(names, drafts)
        self._judge(sequences, drafts)
        self.proposed += sum(map(len, drafts))
        return drafts

    def led(self, round_s: float) -> None:
        self.patience.rounds(round_s - self._wait_s)

    def figures(self) -> dict[str, float]:
        dropped = self.tails.drops.counts  # "nobody": beats to drafters that do not answer, all that sleep among them
        now: dict[str, float] = {
            "waited_s": self.waited_s,
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

    def _judge(self, sequences: Sequence[DraftSequence], drafts: Sequence[list[int]]) -> None:
        every = -(-len(drafts) // MAX_JUDGED) or 1
        self._round += 1
        for i in range(self._round % every, len(drafts), every):
            if len(self._given) == MAX_JUDGED:
                break
            sequence, draft = sequences[i], drafts[i]
            if draft:
                self._given.setdefault(sequence.request_id, (sequence.output_ids, len(sequence.output_ids), draft))

    def _learn(self) -> None:
        """Judge drafts, maybe many plain rounds after they were given."""
        right: list[int] = []
        for name, (output_ids, start, draft) in list(self._given.items()):
            emitted = output_ids[start : start + len(draft)]
            agreed = common(draft, emitted)
            if agreed < len(emitted) or agreed == len(draft):
                right.append(agreed)
                del self._given[name]
        self.patience.judged(right)

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

    def _wait_for(self, names: Sequence[str], windows: Sequence[int], drafts: list[list[int]]) -> float:
        """Wait for drafts while that pays, and fill them in; return the seconds."""
        missing = [] if all(drafts) else [i for i, window in enumerate(windows) if window and not drafts[i]]
        if not missing or not self.tails.live:
            return 0.0
        wait_s, expected = self.patience.bound(len(names), len(missing))
        if wait_s <= 0:
            return 0.0
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
        self.waited_s += ended_s - began_s
        self.waits += 1
        return ended_s - began_s


def connect(drafters: Sequence[Address], *, engine: str, window: int, name: str = "decoupled") -> Decoupled:
    """Connect to drafters, which may come later. `engine` is a name that no other engine has, and the same after a
    restart."""
    session = new_session()
    return Decoupled(session, ZmqLink(session, drafters), engine=engine, window=window, name=name)
