"""What a person sees of a run: a live line on a terminal, one line per step, a table at the end.

Invariants: without a terminal only plain lines are written; a rank that prints nothing still measures its phases, also
failed ones; every change of phase is told.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from specactor.metrics import METRICS, Value
from specactor.rollout.speculation.counters import Counts
from specactor.trace import Recorder
from specactor.types import Trajectory

# Heading, metric, width and format of a step's line.
COLUMNS: tuple[tuple[str, str, int, str], ...] = (
    ("reward", "reward/mean", 8, ".3f"),
    ("acc", "accuracy/train", 6, ".3f"),
    ("length", "response/length_mean", 7, ".1f"),
    ("entropy", "policy/entropy", 8, ".3f"),
    ("clip", "policy/clip_fraction", 7, ".4f"),
    ("max gap", "agreement/logprob_gap_max", 9, ".1e"),
    ("tokens/s", "rollout/tokens_per_s", 9, ",.0f"),
    ("rollout s", "time/rollout_s", 10, ".2f"),
    ("train s", "time/train_s", 8, ".2f"),
    ("sync s", "time/sync_s", 7, ".2f"),
)
assert all(metric in METRICS for _, metric, _, _ in COLUMNS)


class Progress:
    """One run's progress on this rank; `quiet` prints nothing. `on_phase` gets each new phase ("" between two) and the
    number of finished steps."""

    def __init__(
        self,
        total_steps: int,
        *,
        quiet: bool = False,
        on_phase: Callable[[str, int], None] | None = None,
        console: Console | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.total_steps = total_steps
        self.total_seconds: dict[str, float] = {}
        self.problems: dict[str, list[str]] = {}  # by drafter, faults that no line of metrics has yet
        self.recorder = Recorder()  # of the phases; off at first
        self._problems: set[str] = set()
        self._quiet = quiet
        self._on_phase = on_phase
        self._seconds: dict[str, float] = {}
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._phase = ""
        self._step = 0
        self._shown: dict[str, float] = {}
        self._headed = False
        self._begun = self._clock()
        self._phase_begun, self._responses, self._tokens = self._begun, 0, 0
        self._step_times: list[float] = []
        self._last_line: float | None = None
        self._live: Live | None = None
        if not quiet and self._console.is_terminal:
            self._live = Live(get_renderable=self._status, console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @contextmanager
    def phase(self, name: str, *, announce: bool = False) -> Iterator[None]:
        """Measure what runs inside; ``announce`` prints a line, for phases outside steps."""
        outer = self._phase
        self._enter(name)
        self._phase_begun, self._responses, self._tokens = self._clock(), 0, 0
        if announce:
            self.note(name)
        begun = self._clock()
        try:
            yield
        finally:
            spent = self._clock() - begun
            self.recorder.span("phases", name, begun, begun + spent)
            for seconds in (self._seconds, self.total_seconds):
                seconds[name] = seconds.get(name, 0.0) + spent
            self._enter(outer)

    def resume(self, steps_done: int) -> None:
        self._step = steps_done

    def seconds(self) -> dict[str, float]:
        """Return seconds per phase since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken

    def spent(self) -> dict[str, float]:
        """Return the seconds per phase since the last call of `seconds`."""
        return dict(self._seconds)

    def take(self, phase: str) -> float:
        """Return a phase's seconds, which `seconds` then does not."""
        return self._seconds.pop(phase, 0.0)

    def response(self, trajectory: Trajectory) -> None:
        self._responses += 1
        self._tokens += trajectory.num_sampled
        spent = self._clock() - self._phase_begun
        self.update(tokens_per_s=self._tokens / spent if spent > 0 else 0.0)

    def count(self, done: int, total: int, *, loss: float) -> None:
        """Show supervised steps, and print a line at every fifth of the way."""
        self.update(done=done, total=total, loss=loss)
        if done * 5 // total > (done - 1) * 5 // total:
            self.note(f"{self._phase} {done}/{total}, loss {loss:.4f}")

    def update(self, **values: float) -> None:
        """Set values of the status line: tokens_per_s, reward and others, from any thread."""
        self._shown = {**self._shown, **values}

    def note(self, text: str) -> None:
        self._print(f"[{self._clock() - self._begun:7.1f} s] {text}")

    def drafter_problems(self, counts: Mapping[str, Counts]) -> None:
        """Print what is wrong with drafters, each reason once in a run."""
        for name, of in counts.items():
            for problem in of.problems:
                if problem not in self._problems:
                    self._problems.add(problem)
                    self.problems.setdefault(name, []).append(problem)
                    self.note(f"drafter {name}: {problem}. That costs speed, and changes no token.")

    def unreleased(self, why: Sequence[str]) -> None:
        """Print how many environments' `close` failed since the last call, and the first failure."""
        if why:
            self.note(
                f"environments: `close` failed {len(why)} times, so what they hold may be left; the first: {why[0]}"
            )

    def step_line(self, step: int, metrics: Mapping[str, Value]) -> None:
        """Print the line of a finished step; step 0 is the evaluation before the first."""
        now = self._clock()
        if self._last_line is not None:
            self._step_times.append(now - self._last_line)
        self._last_line, self._step = now, step
        if "reward/mean" in metrics:
            self.update(reward=float(metrics["reward/mean"]))
        if not self._headed:
            self._print(f"{'step':>9} " + "".join(f"{title:>{width}}" for title, _, width, _ in COLUMNS) + "  step s")
            self._headed = True
        # Since the line before, whose evaluation is included; unknown for the first line of a run.
        whole = f"{self._step_times[-1]:8.2f}" if self._step_times else f"{'-':>8}"
        cells = [f"{_cell(metrics.get(name), form):>{width}}" for _, name, width, form in COLUMNS]
        self._print(f"{f'{step}/{self.total_steps}':>9} " + "".join(cells) + whole)

    def summary(self, rows: Sequence[tuple[str, str]]) -> None:
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self._print(f"{name:<{width}}  {value}")

    def time_left_s(self) -> float | None:
        """Return the remaining steps' seconds, at the last ten's mean; None at first."""
        recent = self._step_times[-10:]
        if not recent:
            return None
        spent = self._clock() - (self._last_line or 0.0)
        return max(0.0, (self.total_steps - self._step) * sum(recent) / len(recent) - spent)

    def _enter(self, phase: str) -> None:
        self._phase = phase
        if self._on_phase is not None:
            self._on_phase(phase, self._step)

    def _print(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _status(self) -> Text:
        shown = self._shown
        parts = [f"step {min(self._step + 1, self.total_steps)}/{self.total_steps}", self._phase or "..."]
        if self._phase == "warm-up" and "total" in shown:
            parts.append(f"{shown['done']:.0f}/{shown['total']:.0f}, loss {shown['loss']:.4f}")
        if self._responses:
            parts.append(f"{self._responses} responses")
        if "tokens_per_s" in shown:
            parts.append(f"{shown['tokens_per_s']:,.0f} tokens/s")
        for name in ("reward", "accuracy"):
            if name in shown:
                parts.append(f"{name} {shown[name]:.3f}")
        left = self.time_left_s()
        if left is not None:
            parts.append(f"{duration(left)} left")
        return Text("  ".join(parts), style="bold cyan", no_wrap=True, overflow="ellipsis")


def duration(seconds: float) -> str:
    """``75`` -> ``1:15``, ``3700`` -> ``1:01:40``."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def summary_rows(
    lines: Sequence[Mapping[str, Value]], *, seconds: Mapping[str, float], places: Mapping[str, str]
) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    names = dict.fromkeys(name for line in lines for name in line if re.fullmatch(r"accuracy/[\w-]+", name))
    further = [(f"held-out {name}", name) for name in names if name not in ("accuracy/eval", "accuracy/train")]
    for title, name in (("held-out accuracy", "accuracy/eval"), *further, ("reward", "reward/mean")):
        values = [float(line[name]) for line in lines if name in line]
        if values:
            rows.append((title, f"{values[0]:.3f} -> {values[-1]:.3f}"))
    gaps = [float(line["agreement/logprob_gap_max"]) for line in lines if "agreement/logprob_gap_max" in line]
    if gaps:
        rows.append(("largest |engine - trainer| log-prob", f"{max(gaps):.1e}"))
    tokens = sum(float(line["rollout/tokens"]) for line in lines if "rollout/tokens" in line)
    spent = sum(float(line["time/rollout_s"]) for line in lines if "rollout/tokens" in line)
    if spent > 0:
        rows.append(("rollout", f"{tokens / spent:,.0f} tokens/s"))
    rows += _problems(lines)
    rows += [(f"time in {phase}", f"{spent:.1f} s") for phase, spent in seconds.items()]
    return rows + list(places.items())


def _problems(lines: Sequence[Mapping[str, Value]]) -> list[tuple[str, str]]:
    found: dict[str, list[str]] = {}
    for line in lines:
        for name, value in line.items():
            family, _, rest = name.partition("/")
            drafter, _, kind = rest.rpartition("/")
            if family == "speculation" and kind == "problems":
                reasons = found.setdefault(f"drafter {drafter}", [])
                reasons += [reason for reason in str(value).split("; ") if reason not in reasons]
    return [(drafter, "; ".join(reasons)) for drafter, reasons in found.items()]


def _cell(value: Value | None, form: str) -> str:
    return "-" if value is None or isinstance(value, str) else format(value, form)
