"""The page of `decoupled_speed`: one row per drafter and batch, and whether the aims are met. PURE.

Invariants: every cell that was measured has a row, slower than off or not; an aim is counted over all cells, and what
misses it is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from benchmarks.results import Table

PLANS = ("off", "coupled", "decoupled")  # what the planner chooses among
MODES = (*PLANS, "auto")
AUTO_APART, AUTO_TOGETHER = "auto with a drafter process", "auto with two engines"
CONTESTANTS = (*PLANS, AUTO_APART, AUTO_TOGETHER)
"""What is measured; of the two autos a cell has the one in the layout that is planned for it."""
COLUMNS = (
    "drafter",
    "acceptance",
    "batch",
    "off tok/s",
    "predicted",
    *(text for mode in MODES[1:] for text in (f"{mode} x off", "predicted")),
    "fastest",
    "planned",
    "planned / fastest",
    "auto / fastest",
)
WITHIN = 0.97  # of the fastest, what auto and the planned mode are to reach in every cell
MEDIAN_ERROR = 0.10  # most that predictions may be off, in the median
MARGIN = 0.05  # share by which a plan must be predicted faster than off to be planned: what predictions err by


INTRO = """\
Task B's model of 1.8 M parameters, {tokens} tokens per request at temperature 1. Figures are tokens/s over `off` just \
before and after: median of {repetitions} repetitions of {groups} groups of requests, after a warm-up. `off` and \
`coupled`: two engines on a core each, with half of the requests each; `decoupled`: one engine and one drafter process \
on a core each. `auto` has the layout that is planned for the cell, and chooses per request and round among off, \
drafting in the engine and the drafter process's drafts. `dialled` drafters compute nothing: they take a given share \
of a plain step per token, and are right with a given probability (acceptance: of the first draft token). Predicted is \
the planner's best plan of a mode, from rounds that were timed before on other requests; it plans another mode than \
off only where it predicts a gain of more than {margin:.0%}. The file has all {cells} cells and predictions."""


def planned(foreseen: Mapping[str, float]) -> str:
    """The plan that is predicted to be fastest; one that drafts only by more than the margin."""
    return max(PLANS, key=lambda mode: foreseen[mode] / (1.0 if mode == "off" else 1.0 + MARGIN))


def drafts_elsewhere(mode: str) -> bool:
    """Whether a plan has a drafter process beside one engine, in place of a second engine."""
    return mode not in ("off", "coupled")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One drafter at one batch."""

    drafter: str
    acceptance: float  # of the first draft token
    batch: int
    off: tuple[float, float]  # tokens per second without drafts: median, and the planner's
    measured: Mapping[str, float]  # times as fast as off, by mode; medians
    foreseen: Mapping[str, float]  # the planner's; 0 where it has no such plan

    @property
    def name(self) -> str:
        return f"{self.drafter}, acceptance {self.acceptance:.2f}, batch {self.batch}"

    @property
    def fastest(self) -> str:
        """Of the plans, as measured; the first among equals, as with the planner."""
        return max(PLANS, key=lambda mode: self.measured[mode])

    @property
    def planned(self) -> str:
        return planned(self.foreseen)

    def of_fastest(self, mode: str) -> float:
        """What a mode reaches of the fastest plan."""
        return self.measured[mode] / self.measured[self.fastest]

    @property
    def errors(self) -> dict[str, float]:
        """|predicted / measured - 1| of times as fast as off, by mode, where there is a prediction."""
        return {m: abs(self.foreseen[m] / self.measured[m] - 1) for m in MODES[1:] if self.foreseen[m] > 0}

    @property
    def decoupled_loses(self) -> bool:
        """To what needs no process beside the engines."""
        return not drafts_elsewhere(self.fastest)

    def row(self) -> list[str]:
        """By COLUMNS."""
        predicted = {m: f"{self.foreseen[m]:.2f}" if self.foreseen[m] > 0 else "-" for m in MODES}
        return [
            self.drafter,
            f"{self.acceptance:.2f}",
            str(self.batch),
            *(f"{speed:.0f}" for speed in self.off),
            *(text for m in MODES[1:] for text in (f"{self.measured[m]:.2f}", predicted[m])),
            self.fastest,
            self.planned,
            f"{self.of_fastest(self.planned):.2f}",
            f"{self.of_fastest('auto'):.2f}",
        ]


def _measured_over_foreseen(cells: Sequence[Cell]) -> dict[str, list[float]]:
    """By mode that was predicted; 1 where the prediction was right."""
    found = {m: [cell.measured[m] / cell.foreseen[m] for cell in cells if cell.foreseen[m] > 0] for m in MODES[1:]}
    return {mode: ratios for mode, ratios in found.items() if ratios}


def aims(cells: Sequence[Cell]) -> list[str]:
    """One line each; at least one cell."""
    errors = [error for cell in cells for error in cell.errors.values()]
    by_mode = {mode: [cell.errors[mode] for cell in cells if mode in cell.errors] for mode in MODES[1:]}
    each = ", ".join(f"{mode} {median(of):.0%}" for mode, of in by_mode.items() if of)
    over = ", ".join(f"{mode} {median(of):.2f}" for mode, of in _measured_over_foreseen(cells).items())
    paces = [cell.off[0] / cell.off[1] for cell in cells]
    pace = min(paces), max(paces)
    lost = [cell for cell in cells if cell.decoupled_loses]
    won = [cell for cell in cells if not cell.decoupled_loses]
    unknown = [cell for cell in lost if drafts_elsewhere(cell.planned)]
    foregone = [cell for cell in won if not drafts_elsewhere(cell.planned)]
    slow = [cell for cell in cells if cell.of_fastest("auto") < WITHIN]
    misplaced = [cell for cell in slow if drafts_elsewhere(cell.planned) == cell.decoupled_loses]
    return [
        _aim(f"auto reaches {WITHIN:.2f} of the fastest column in every cell", not slow)
        + f" {len(cells) - len(slow)} of {len(cells)} cells; least {_least(cells, 'auto')}. In {len(misplaced)} of the"
        f" {len(slow)} that miss it, the fastest has the other layout." + _named(slow),
        _aim(f"median error of predictions at most {MEDIAN_ERROR:.0%}", median(errors) <= MEDIAN_ERROR)
        + f" {median(errors):.0%}, largest {max(errors):.0%}; median by column: {each}. Measured over"
        f" predicted, median by column: {over}. Tokens per second of off are {pace[0]:.2f}-{pace[1]:.2f} of what was"
        " predicted: the machine's pace, and what the table errs by.",
        _aim("where decoupled loses, the planner plans something else", not unknown)
        + f" Decoupled loses in {len(lost)} of {len(cells)} cells, and the planner knew it"
        f" in {len(lost) - len(unknown)} of these; it wins in {len(won)}, and was planned in"
        f" {len(won) - len(foregone)} of these." + _named(unknown),
        _aim(
            f"the planned mode reaches {WITHIN:.2f} of the fastest in every cell",
            all(cell.of_fastest(cell.planned) >= WITHIN for cell in cells),
        )
        + f" {sum(cell.of_fastest(cell.planned) >= WITHIN for cell in cells)} of {len(cells)} cells; least"
        f" {min(cell.of_fastest(cell.planned) for cell in cells):.2f}.",
    ]


def means(cells: Sequence[Cell]) -> str:
    """Geometric, of times as fast as off."""
    of = {mode: geometric_mean(cell.measured[mode] for cell in cells) for mode in MODES[1:]}
    fastest = geometric_mean(cell.measured[cell.fastest] for cell in cells)
    each = ", ".join(f"{mode} {mean:.2f}" for mode, mean in of.items())
    return f"Geometric mean of x off over all cells: {each}; the fastest of the plans in each, {fastest:.2f}."


def verdict(cells: Sequence[Cell]) -> str:
    """How fast each mode is, where it loses to no drafts, and which aims are missed."""

    def of(mode: str) -> str:
        found = [cell.measured[mode] for cell in cells]
        slower = sum(ratio < 1 for ratio in found)
        return f"{mode} {geometric_mean(found):.2f} ({min(found):.2f}-{max(found):.2f}, slower in {slower})"

    best = geometric_mean(cell.measured[cell.fastest] for cell in cells)
    missed = sum(line.startswith("MISSED") for line in aims(cells))
    return (
        f"Tokens/s over decoding without drafts, geometric mean of {len(cells)} cells (smallest to largest): "
        f"{', '.join(of(mode) for mode in MODES[1:])}; the fastest plan of every cell "
        f"{best:.2f}. {missed} of {len(aims(cells))} aims are missed."
    )


def summary(cells: Sequence[Cell]) -> Table:
    """Geometric means over batches, by drafter; of the trained model over all."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        dialled = cell.drafter.startswith("dialled")
        groups.setdefault((cell.drafter, f"{cell.acceptance:.2f}" if dialled else "-"), []).append(cell)
    rows = [
        [
            *group,
            *(f"{geometric_mean(cell.measured[mode] for cell in of):.2f}" for mode in MODES[1:]),
            f"{min(cell.of_fastest('auto') for cell in of):.2f}",
            f"{min(cell.of_fastest(cell.planned) for cell in of):.2f}",
        ]
        for group, of in groups.items()
    ]
    return ("drafter", "acceptance", *MODES[1:], "auto / fastest, least", "planned / fastest, least"), rows


def _aim(text: str, met: bool) -> str:
    return f"{'Met' if met else 'MISSED'}: {text}."


def _least(cells: Sequence[Cell], mode: str) -> str:
    return f"{min(cell.of_fastest(mode) for cell in cells):.2f}" if cells else "-"


def _named(cells: Sequence[Cell]) -> str:
    """Cells, by drafter and acceptance."""
    batches: dict[str, list[str]] = {}
    for cell in cells:
        batches.setdefault(f"{cell.drafter}, {cell.acceptance:.2f}", []).append(str(cell.batch))
    each = "; ".join(f"{drafter}: batch {', '.join(of)}" for drafter, of in batches.items())
    return f" Missed by {each}." if cells else ""


class Progress:
    """How long it will yet take, from what was done. Clock passed in, seconds."""

    def __init__(self, weights: Sequence[float], now_s: float) -> None:
        """Args: of each part, what it may cost beside the others."""
        self._left, self._done, self._began_s = list(weights), 0.0, now_s

    def over(self, now_s: float) -> str:
        """The first part that was left is done: "4:05 left"."""
        self._done += self._left.pop(0)
        left_s = (now_s - self._began_s) * sum(self._left) / self._done
        return f"{int(left_s) // 60}:{int(left_s) % 60:02d} left"
