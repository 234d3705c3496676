"""Whether a drafter process drafts branches (`branches`), where it may choose. PURE: seconds are passed in.

Branches cost second choices, which make every turn longer, and they bring drafts that are there at once after a
rejection. The planner's own model (`throughput_model.running`) says what that is worth, of what this drafter has seen
of late: how often its draft tokens and second choices were right, what the engines' rounds took by the rows that they
verified, and what its own turns took with second choices and without. Once in a while it does the other thing for some
turns, so that all of this is known.

Invariants: only the past is used; no branches while little is known; the other thing is done in at most
`MAX_LOOK_TURNS` of `LOOK_EVERY_TURNS` turns, once it was done; the model is asked after that and every `ASK_EVERY_S`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, linear_regression, median
from typing import NamedTuple

from specactor.rollout.decoupled.patience import LINK_S
from specactor.rollout.planning.acceptance import survival_of
from specactor.rollout.planning.costs import Grid
from specactor.rollout.planning.throughput_model import AHEAD, Pace, Running, running

MIN_GAIN = 1.03
"""Predicted, to begin with branches; predictions err. They go on as long as any is predicted."""
ASK_EVERY_S = 1.0
MIN_SAMPLES = 16
"""Rounds, turns, and rejections."""
MAX_SAMPLES = 256
MIN_TURNS = 4
"""Of about equal sizes (within a power of two), with second choices and without, to be compared."""
MAX_TURNS = 16
LONGEST_ROUND_S = 1.0
"""An engine whose commits are further apart has decoded plainly meanwhile, or had nothing to do."""
OUTLIER = 4.0
"""So many times the median, a round is no such round either."""
LOOK_TURNS = 32
"""To do the other thing for, and longer while second choices were seen in too few rejections."""
MAX_LOOK_TURNS = 512
LOOK_EVERY_TURNS = 8192


class Judged(NamedTuple):
    """What a commit said of what was drafted ahead of it."""

    window: int
    ahead: int
    """Draft tokens that the engine may have verified, at most a window."""
    examined: int
    """Draft tokens whose place it told, up to the first wrong one."""
    right: int
    foreseen: bool | None
    """Whether the second choice was right where the draft was wrong; None: nothing was wrong, or there was no second
    choice."""
    fresh: int
    """Tokens that it committed: more than a window and one are of several rounds, in which nobody was asked."""


@dataclass(slots=True)
class _Heard:
    """Of one engine, in one turn: several rounds where those are shorter than turns."""

    before_s: float
    """When it was heard before that."""
    now_s: float
    rows: list[float]
    """Per request, by round; not known of several rounds in one commit."""
    several: bool = False
    """There were such commits."""


class Foresight:
    """Of one drafter process."""

    def __init__(self) -> None:
        self.on = False
        """Branches are drafted."""
        self.gain = 1.0
        """That they are predicted to bring: a ratio of speeds."""
        self._pays = False
        self._turns = 0
        """Since `on` changed last."""
        self._ask_s = 0.0
        self._heard: dict[int, _Heard] = {}
        """The last commits, by engine."""
        self._rounds: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)
        """(rows per request, seconds)"""
        self._tokens: deque[tuple[int, int]] = deque(maxlen=MAX_SAMPLES)
        """(examined, right)"""
        self._foreseen: deque[bool] = deque(maxlen=MAX_SAMPLES)
        self._news = 0
        """Rejections with second choices since `on` changed last."""
        self._latest_s: deque[float] = deque(maxlen=MAX_SAMPLES)
        """Turns since `on` changed last."""
        self._by_size_s: dict[bool, dict[int, deque[float]]] = {False: {}, True: {}}
        """Turns without second choices and with them, by their sizes."""
        self._window = 1

    def commits(self, engine: int, now_s: float, judged: Sequence[Judged]) -> None:
        """Of one round of an engine; of those that were heard in one turn, at the same time."""
        heard = self._heard.get(engine)
        if heard is None or heard.now_s != now_s:
            before_s = float("-inf") if heard is None else heard.now_s
            self._learn_rounds(heard)
            heard = self._heard[engine] = _Heard(before_s=before_s, now_s=now_s, rows=[])
        heard.rows.append(1.0 + fmean(each.ahead for each in judged))
        heard.several |= any(each.fresh > each.window + 1 for each in judged)
        self._window = judged[-1].window
        for each in judged:
            if each.examined:
                self._tokens.append((each.examined, each.right))
            if each.foreseen is not None:
                self._foreseen.append(each.foreseen)
                self._news += 1

    def _learn_rounds(self, heard: _Heard | None) -> None:
        """All of a turn are known."""
        if heard is None or heard.several:
            return
        each_s = (heard.now_s - heard.before_s) / len(heard.rows)
        if 0 < each_s < LONGEST_ROUND_S:
            self._rounds.extend((rows, each_s) for rows in heard.rows)

    def forget(self, engine: int) -> None:
        """It is gone."""
        self._heard.pop(engine, None)

    def turn(self, requests: int, seconds: float) -> None:
        """So many were drafted for, with second choices if `on`."""
        self._by_size_s[self.on].setdefault(requests.bit_length(), deque(maxlen=MAX_TURNS)).append(seconds)
        self._latest_s.append(seconds)
        self._turns += 1

    def look(self, now_s: float, requests: int) -> bool:
        """Whether to draft branches from now on. Args: requests that the process holds."""
        if self.on != self._pays:
            known = self._turns >= LOOK_TURNS and (not self.on or self._news >= MIN_SAMPLES)
            if known or self._turns >= MAX_LOOK_TURNS:
                self._ask(now_s, requests)
                self._do(self._pays)
        elif self._turns >= (LOOK_EVERY_TURNS if self._by_size_s[not self.on] else LOOK_TURNS):
            self._do(not self._pays)
        elif now_s >= self._ask_s:
            self._ask(now_s, requests)
            self._do(self._pays)
        return self.on

    def _do(self, on: bool) -> None:
        if self.on != on:
            self.on = on
            self._turns = self._news = 0
            self._latest_s.clear()

    def _ask(self, now_s: float, requests: int) -> None:
        self._ask_s = now_s + ASK_EVERY_S
        samples = (self._rounds, self._tokens, self._foreseen, self._latest_s)
        longer = self._times_as_long()
        if not longer or min(len(of) for of in samples) < MIN_SAMPLES:
            return
        latest_s = median(self._latest_s)
        without_s = latest_s / longer if self.on else latest_s
        hit_rate = fmean(self._foreseen)
        self.gain = self._speed(requests, without_s * longer, hit_rate) / self._speed(requests, without_s, 0.0)
        self._pays = self.gain > (1.0 if self._pays else MIN_GAIN)

    def _times_as_long(self) -> float | None:
        """That turns take with second choices; None where that is not known."""
        without, beside = (
            {size: median(of) for size, of in self._by_size_s[on].items() if len(of) >= MIN_TURNS}
            for on in (False, True)
        )
        both = without.keys() & beside.keys()
        return median(beside[size] / without[size] for size in both) if both else None

    def _speed(self, requests: int, token_s: float, hit_rate: float) -> float:
        """Tokens per second of a request, as predicted; with branches, if those are ever right."""
        window = self._window
        examined, right = (sum(column) for column in zip(*self._tokens, strict=True))
        pace = Pace(
            requests=max(1, requests),
            round_s=self._round_s(),
            token_s=token_s,
            message_s=LINK_S,
            most=AHEAD * window,
        )
        survival = survival_of(right / examined, window + 1)
        found: Running = running(survival, window, pace, hit_rate=hit_rate, branches=window if hit_rate else 0)
        return found.tokens / found.round_s

    def _round_s(self) -> Grid:
        """A line over rows per request, through rounds of late; level where rows seem to save time."""
        limit_s = OUTLIER * median(seconds for _, seconds in self._rounds)
        rows, seconds = zip(*(each for each in self._rounds if each[1] <= limit_s), strict=True)
        slope, base_s = linear_regression(rows, seconds) if len(set(rows)) > 1 else (0.0, fmean(seconds))
        if slope < 0 or base_s + slope <= 0:
            slope, base_s = 0.0, fmean(seconds)
        most = 1.0 + self._window
        return Grid(requests=(1.0,), per_request=(1.0, most), seconds=((base_s + slope, base_s + slope * most),))
