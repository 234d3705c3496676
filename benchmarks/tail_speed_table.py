"""The workload and the page of `tail_speed`: lengths, where the tail begins, what is compared, and the aims. PURE.

The tail is the same for all contestants: the tokens of the longest responses, from the moment when the last of all
other responses ended. In it `TAIL` requests run or fewer.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.results import Result, spread

REQUESTS = 64
TAIL = 16  # requests that run when the tail begins: the longest
OFF = "off"
WITHOUT = "auto"  # each request has one drafter
FASTEST = {f"auto, fastest of {n}": n for n in (2, 3)}  # contestant -> drafters that a request may have at once
AIM, FLOOR = 1.1, 0.98  # of Fastest-of-N over one drafter per request: in the tail, and anywhere
COLUMNS = ("contestant", "rollout tok/s", "rollout / off", "tail tok/s", "tail / off", "accept_length", "drafted by")


SHOWN = (0, 2, 4, 5, 6)  # columns on the page; the file has the rest


@dataclass(frozen=True, kw_only=True)
class Law:
    """The most tokens of a response follow a Pareto law, cut at `longest`."""

    shortest: int
    longest: int
    index: float = 1.0  # A response is longer than x with probability (shortest / x) ** index

    def lengths(self, requests: int, seed: int) -> list[int]:
        """Tokens per request: the law's quantiles, the same in every rollout, in an order that the seed gives."""
        shares = [1 - (i + 0.5) / requests for i in range(requests)]
        lengths = [min(self.longest, round(self.shortest * share ** (-1 / self.index))) for share in shares]
        random.Random(seed).shuffle(lengths)
        return lengths


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What one repetition is."""

    law: Law
    rollouts: int  # one after the other, with other prompts; their tokens and seconds are added up


def tail_of(lengths: Mapping[str, int], tail: int = TAIL) -> set[str]:
    """The requests with the longest responses; of equally long ones, those that come first."""
    return set(sorted(lengths, key=lambda name: -lengths[name])[:tail])


@dataclass(frozen=True, kw_only=True)
class Run:
    """One contestant's rollout, or several."""

    tokens: int
    seconds: float
    tail_tokens: float
    tail_s: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def tail_speed(self) -> float:
        return self.tail_tokens / self.tail_s

    @classmethod
    def total(cls, runs: Sequence[Run]) -> Run:
        """Of several rollouts, one after the other."""
        return cls(
            tokens=sum(run.tokens for run in runs),
            seconds=sum(run.seconds for run in runs),
            tail_tokens=sum(run.tail_tokens for run in runs),
            tail_s=sum(run.tail_s for run in runs),
        )


@dataclass(kw_only=True)
class Timeline:
    """How many tokens each request had when."""

    began: float
    reports: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Request -> (clock, tokens); the last report is of its end."""

    def report(self, request_id: str, clock: float, tokens: int) -> None:
        self.reports.setdefault(request_id, [(self.began, 0)]).append((clock, tokens))

    def tokens_at(self, request_id: str, clock: float) -> float:
        """Linear between two reports."""
        reports = self.reports[request_id]
        after = bisect_right(reports, clock, key=lambda report: report[0])
        if after == len(reports):
            return reports[-1][1]
        (t0, n0), (t1, n1) = reports[after - 1], reports[after]
        return n0 + (n1 - n0) * (clock - t0) / (t1 - t0)

    def run(self, tail: set[str]) -> Run:
        """What became of it. Raises ValueError where the tail's requests end before the others, or are all."""
        ends = {name: reports[-1] for name, reports in self.reports.items()}
        over = max(clock for clock, _ in ends.values())
        starts = max((clock for name, (clock, _) in ends.items() if name not in tail), default=over)
        if over <= starts:
            raise ValueError(f"tail: got one of {over - starts:.3f} s, expected > 0. Make the longest requests longer.")
        return Run(
            tokens=sum(tokens for _, tokens in ends.values()),
            seconds=over - self.began,
            tail_tokens=sum(ends[name][1] - self.tokens_at(name, starts) for name in tail),
            tail_s=over - starts,
        )


@dataclass(kw_only=True)
class Tally:
    """All that one model's contestants did."""

    model: str
    runs: dict[str, list[Run]] = field(default_factory=dict)  # contestant -> per repetition
    counts: dict[str, dict[str, tuple[int, int, int]]] = field(default_factory=dict)
    """Contestant -> drafter -> (emitted, verifies, drafted), over all repetitions."""

    def add(self, name: str, run: Run, counts: Mapping[str, tuple[int, int, int]]) -> None:
        self.runs.setdefault(name, []).append(run)
        sums = self.counts.setdefault(name, {})
        for drafter, values in counts.items():
            old = sums.get(drafter, (0, 0, 0))
            sums[drafter] = (old[0] + values[0], old[1] + values[1], old[2] + values[2])

    def ratios(self, name: str, over: str, *, tail: bool) -> list[float]:
        """Speed of one contestant over another's in the same repetition; per repetition."""
        pairs = zip(self.runs[name], self.runs[over], strict=True)
        return [a.tail_speed / b.tail_speed if tail else a.speed / b.speed for a, b in pairs]

    def best_single(self, *, tail: bool) -> str | None:
        """The fastest contestant with one drafter, as one knows when all is over."""
        singles = [name for name in self.runs if name not in (OFF, WITHOUT, *FASTEST)]
        return max(singles, key=lambda name: median(self.ratios(name, OFF, tail=tail)), default=None)

    def row(self, name: str) -> list[str]:
        """Of the table."""
        runs, counts = self.runs[name], self.counts[name]
        emitted, verifies, drafted = (sum(values[i] for values in counts.values()) for i in range(3))
        shares = {drafter: values[2] / drafted for drafter, values in counts.items() if values[2]}
        return [
            f"{self.model}: {name}",
            f"{median(run.speed for run in runs):.0f}",
            "-" if name == OFF else spread(self.ratios(name, OFF, tail=False)),
            f"{median(run.tail_speed for run in runs):.0f}",
            "-" if name == OFF else spread(self.ratios(name, OFF, tail=True)),
            f"{emitted / verifies:.2f}" if verifies else "-",
            ", ".join(f"{drafter} {share:.0%}" for drafter, share in shares.items()) or "-",
        ]

    def verdict(self) -> str:
        """Over plain decoding, and Fastest-of-N beside its aim."""
        names = [name for name in (WITHOUT, *FASTEST) if name in self.runs]
        tails = {name: spread(self.ratios(name, OFF, tail=True)) for name in names}
        over = {n: self.ratios(n, WITHOUT, tail=True) for n in names if n != WITHOUT and WITHOUT in names}
        text = f"Tokens/s in the tail over plain decoding ({self.model}): "
        text += "; ".join(f"{name} {value}" for name, value in tails.items()) or "not measured"
        if over:
            least = min(over, key=lambda name: median(over[name]))
            met = "met" if median(over[least]) >= AIM else "missed"
            text += f". Fastest-of-N over one drafter per request: at least {spread(over[least])} (aim {AIM}: {met})"
        return f"{text}."

    def verdicts(self) -> list[str]:
        """Lines about what was chosen in hindsight, and about the aims of Fastest-of-N."""
        lines = []
        for tail, part in ((False, "rollout"), (True, "tail")):
            best = self.best_single(tail=tail)
            if best is not None:
                against = [
                    f"{name} {spread(self.ratios(name, best, tail=tail))}"
                    for name in (OFF, WITHOUT, *FASTEST)
                    if name in self.runs
                ]
                lines.append(
                    f"{self.model}, {part} over the best single drafter in hindsight ({best}): {'; '.join(against)}."
                )
        return [*lines, *self._aims()]

    def _aims(self) -> list[str]:
        measured = [name for name in FASTEST if name in self.runs] if WITHOUT in self.runs else []
        if not measured:
            return []
        ratios = {(name, tail): self.ratios(name, WITHOUT, tail=tail) for name in measured for tail in (True, False)}
        missed = [name for name in measured if median(ratios[name, True]) < AIM]
        under = [
            f"{name}, {'tail' if tail else 'rollout'} {spread(values)}"
            for (name, tail), values in ratios.items()
            if median(values) < FLOOR
        ]
        shown = "; ".join(
            f"{name} tail {spread(ratios[name, True])}, rollout {spread(ratios[name, False])}" for name in measured
        )
        return [
            f"{self.model}: over one drafter per request: {shown}.",
            f"{self.model}: aim: at least {AIM} of one drafter per request in the tail: {_verdict(missed)}.",
            f"{self.model}: aim: never under {FLOOR} of one drafter per request: {_verdict(under)}.",
        ]


def _verdict(missed: Sequence[str]) -> str:
    return f"missed by {'; '.join(missed)}" if missed else "met"


def result(tallies: Sequence[Tally], settings: Mapping[str, Setting], load: float, tokens_per_report: int) -> Result:
    """The page. Args: per model; load average before the start."""
    repetitions = min(len(runs) for tally in tallies for runs in tally.runs.values())
    laws = ", ".join(
        f"{setting.law.shortest}-{setting.law.longest} tokens, {setting.rollouts} rollouts per repetition ({model})"
        for model, setting in settings.items()
    )
    rows = [tally.row(name) for tally in tallies for name in tally.runs]
    return Result(
        title="The tail of a rollout",
        verdict=" ".join(tally.verdict() for tally in tallies),
        intro=(
            f"Rollouts of {REQUESTS} requests (groups of 8, temperature 1, new long sums) with "
            "heavy-tailed lengths: responses end where the model ends them, or at quantiles of a Pareto distribution "
            f"of index 1, {laws}. One engine on one core; contestants take turns and emit the same tokens, which is "
            f"checked. Medians (minimum-maximum) of {repetitions} repetitions; ratios are within one. The tail: the "
            f"{TAIL} longest responses, from the moment when the last of the {REQUESTS - TAIL} others ended (known "
            f"every {tokens_per_report} tokens). `window 4` is fixed, `chosen` at most 8 by predicted speed. `auto` "
            "chooses among all drafters, or none, for each request; `fastest of N` may verify drafts of up to N of "
            "them in a tree. `drafted by`: shares of the draft tokens that were verified."
        ),
        columns=COLUMNS,
        rows=rows,
        summary=([COLUMNS[at] for at in SHOWN], [[row[at] for at in SHOWN] for row in rows]),
        notes="\n".join(
            [
                *(f"- {line}" for tally in tallies for line in tally.verdicts()),
                "",
                f"Load average before the start: {load:.1f}.",
            ]
        ),
    )
