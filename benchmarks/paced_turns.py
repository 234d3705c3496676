"""Why turns had no drafts, from what engines and a drafter process note by one clock.

An engine notes when a round told the drafter of its tokens and when it looked for drafts; a drafter notes its steps.
After the run `cause` says what the drafter did when the engine looked. A turn is a request in a round.

Invariant: every turn without drafts has one cause.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.dialled import Elsewhere
from benchmarks.results import markdown
from specactor.rollout.decoupled.drafter_side import Lane
from specactor.rollout.decoupled.spec import DrafterSpec

OLD = -1  # position of a lane whose text is not what the request emits
OTHERS, OWN_OLD = "busy with others alone", "busy with its old text"
MESSAGE, STEP = "message under way", "its own step goes on"
LAST, CHOICE, FIRST, OTHER = "last token", "none chosen", "first turn", "other"
WAITING = (OTHERS, OWN_OLD, MESSAGE, STEP)  # causes in which drafts came later
CAUSES = (*WAITING, LAST, CHOICE, FIRST, OTHER)


class Turn(msgspec.Struct, frozen=True, array_like=True):
    """A turn without drafts."""

    seed: int = 0  # of the request; 0: no drafter elsewhere was asked
    length: int = 0  # output tokens before it
    window: int = 0  # drafts that it might have had
    told_s: float = 0.0  # when the drafter was told of these tokens
    looked_s: float = 0.0  # when drafts were looked for, for the last time
    drafted: int = 0  # drafts that were there


class Turns(msgspec.Struct, kw_only=True):
    turns: int = 0
    empty: list[Turn] = []


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One step of a drafter, for several lanes."""

    began_s: float
    ended_s: float
    lanes: list[tuple[int, int]]  # (seed, position that it drafts for), or OLD


class Logged(Elsewhere):
    """Appends every step to a file beside its script."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__(spec)
        self._file = log_of(Path(spec.model_dir)).open("wb")

    def extend(self, lanes: Sequence[Lane]) -> list[list[int]]:
        began_s = time.perf_counter()
        drafts = super().extend(lanes)
        noted = [(lane.seed, position(self._script.outputs[str(lane.seed)], lane.tokens)) for lane in lanes]
        self._file.write(msgspec.json.encode(Step(began_s, time.perf_counter(), noted)) + b"\n")
        self._file.flush()
        return drafts


def position(right: Sequence[int], tokens: Sequence[int]) -> int:
    """Return where a lane drafts, or OLD if its text is not how the output begins."""
    count = min(len(right), len(tokens))
    return len(tokens) if list(tokens[:count]) == list(right[:count]) else OLD


def log_of(script: Path) -> Path:
    return script.with_suffix(".steps")


def logged(script: Path, since_s: float) -> list[Step]:
    """Return the steps that ended since then."""
    steps = msgspec.json.Decoder(Step).decode_lines(log_of(script).read_bytes())
    return [step for step in steps if step.ended_s >= since_s]


class Log:
    """Steps of one drafter, one after the other."""

    def __init__(self, steps: Iterable[Step]) -> None:
        self._steps = sorted(steps, key=lambda step: step.began_s)
        self._begins = [step.began_s for step in self._steps]
        self._serving: dict[tuple[int, int], Step] = {}
        for step in self._steps:
            for lane in step.lanes:
                self._serving.setdefault(lane, step)

    def serving(self, seed: int, length: int) -> Step | None:
        """Return the first step that drafted what may follow so many right tokens."""
        return self._serving.get((seed, length))

    def at(self, now_s: float) -> Step | None:
        """Return the step that goes on then."""
        k = bisect_right(self._begins, now_s) - 1
        return self._steps[k] if k >= 0 and now_s < self._steps[k].ended_s else None


def cause(turn: Turn, log: Log) -> tuple[str, float]:
    """Return why a turn had no drafts, and the seconds from its look to the end of the step that made some; 0 where it
    does not wait for any."""
    if not turn.seed or turn.drafted:
        return CHOICE, 0.0
    if not turn.window:
        return LAST, 0.0
    if turn.length <= 1:
        return FIRST, 0.0
    serving = log.serving(turn.seed, turn.length)
    if serving is None:
        return OTHER, 0.0
    late_s = max(0.0, serving.ended_s - turn.looked_s)
    running = log.at(turn.looked_s)
    if running is serving:
        return STEP, late_s
    if running is None or serving.ended_s <= turn.looked_s:
        return MESSAGE, late_s
    return (OWN_OLD if any(seed == turn.seed for seed, _ in running.lanes) else OTHERS), late_s


@dataclass(kw_only=True)
class Causes:
    """What became of one contestant's turns."""

    turns: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    late_s: float = 0.0  # of all that waited

    def add(self, other: Causes) -> None:
        self.turns += other.turns
        self.counts += other.counts
        self.late_s += other.late_s

    @classmethod
    def of(cls, turns: Turns, steps: Iterable[Step]) -> Causes:
        log, found = Log(steps), cls(turns=turns.turns)
        for turn in turns.empty:
            name, late_s = cause(turn, log)
            found.counts[name] += 1
            found.late_s += late_s
        return found

    def row(self, setting: str, contestant: str, pass_s: float) -> list[str]:
        empty = max(1, self.counts.total())
        waiting = sum(self.counts[name] for name in WAITING)
        return [
            setting,
            contestant,
            f"{self.counts.total() / max(1, self.turns):.2f}",
            *(f"{self.counts[name] / empty:.2f}" for name in CAUSES),
            f"{self.late_s / waiting / pass_s:.2f}" if waiting else "-",
        ]


COLUMNS = ("setting", "contestant", "turns without drafts", *CAUSES, "drafts there after, of a pass")


def described(rows: Sequence[Sequence[str]]) -> str:
    """Return the page's part about turns without drafts."""
    if not rows:
        return ""
    return (
        "Why turns of `decoupled` had no drafts ([other contestants](paced_turns.csv)): shares of those turns, by what "
        "the drafter did when the engine looked for drafts, by the drafter's own log. It was *busy*: with a step that "
        "began before it heard what the round before had emitted, for other requests alone, or also for this one, with "
        "a text that the news has overtaken; the *message* was under way, there or back; or *its own step* went on, "
        "with the right text. *Last token*: a round that ends the request has no room for drafts. *None chosen*: there "
        "were drafts, or nobody was asked, and costs decided for none. Last column: seconds from the look to the end "
        "of the step that made the first usable draft, over those of a plain pass, mean of the first four causes.\n\n"
        + markdown(COLUMNS, rows)
    )
