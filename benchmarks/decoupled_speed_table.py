"""The page of `decoupled_speed`: one row per drafter and batch, and whether the aims are met. PURE.

Invariants: every cell that was measured has a row, slower than off or not; an aim is counted over all cells, and what
misses it is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

PLANS = ("off", "coupled", "decoupled", "pre-drafting")
"""What the planner chooses among; pre-drafting is decoupled with branches."""
MODES = (*PLANS, "auto")
COLUMNS = (
    "drafter",
    "acceptance",
    "batch",
    "off tok/s",
    *(text for mode in MODES[1:] for text in (f"{mode} tok/s", "x off")),
    *(f"{mode} predicted" for mode in MODES),
    "fastest",
    "planned",
    "planned / fastest",
    "auto / fastest",
)
WITHIN = 0.97
"""Of the fastest, what auto and the planned mode are to reach in every cell."""
MEDIAN_ERROR = 0.10
"""Most that predictions may be off, in the median."""
MARGIN = 0.05
"""Share by which a plan must be predicted faster than off to be planned: what predictions err by."""


INTRO = """\
Task B's model of 1.8 M parameters, {tokens} tokens per request at temperature 1, median of {repetitions} repetitions \
in turns, each after a first decoding that teaches costs and acceptance. `off` and `coupled`: two engines on a core \
each, with half of the requests each; `decoupled`, `pre-drafting` (with branches) and `auto`: one engine and one \
drafter process on a core each. Auto chooses per request and round among off, drafting in the engine, and the drafter \
process's drafts without branches. Windows are chosen while it runs. `x off`: times as fast as off. `dialled` drafters \
compute nothing: they take a given share of a plain step per token, and are right as often as told; where they are \
wrong, their second choice is right with probability {hit_rate}. Acceptance is that of the first draft token. \
`predicted` is the planner's best plan of a mode, from rounds and drafter processes that were timed before on other \
requests, less what is lost because requests end in different rounds (auto: its best with one engine; how often tokens \
and branches are right is taken from the run itself). \
`planned` and `fastest` are among all columns but auto; planned is another than off only where it is predicted faster \
by more than {margin:.0%}."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One drafter at one batch."""

    drafter: str
    acceptance: float
    """Of the first draft token."""
    batch: int
    measured: Mapping[str, float]
    """Tokens per second by mode; medians."""
    foreseen: Mapping[str, float]
    """The planner's; 0 where it has no such plan."""

    @property
    def name(self) -> str:
        return f"{self.drafter}, acceptance {self.acceptance:.2f}, batch {self.batch}"

    @property
    def fastest(self) -> str:
        """Of the plans, as measured; the first among equals, as with the planner."""
        return max(PLANS, key=lambda mode: self.measured[mode])

    @property
    def planned(self) -> str:
        return max(PLANS, key=lambda mode: self.foreseen[mode] / (1.0 if mode == "off" else 1.0 + MARGIN))

    def of_fastest(self, mode: str) -> float:
        """What a mode reaches of the fastest plan."""
        return self.measured[mode] / self.measured[self.fastest]

    @property
    def errors(self) -> dict[str, float]:
        """|predicted / measured - 1| by mode, where there is a prediction."""
        return {m: abs(self.foreseen[m] / self.measured[m] - 1) for m in MODES if self.foreseen[m] > 0}

    @property
    def decoupled_loses(self) -> bool:
        """Without branches or with them, to what needs no process beside the engines."""
        return not _drafts_elsewhere(self.fastest)

    def row(self) -> list[str]:
        """By COLUMNS."""
        off = self.measured["off"]
        return [
            self.drafter,
            f"{self.acceptance:.2f}",
            str(self.batch),
            f"{off:.0f}",
            *(text for m in MODES[1:] for text in (f"{self.measured[m]:.0f}", f"{self.measured[m] / off:.2f}")),
            *(f"{self.foreseen[m]:.0f}" if self.foreseen[m] > 0 else "-" for m in MODES),
            self.fastest,
            self.planned,
            f"{self.of_fastest(self.planned):.2f}",
            f"{self.of_fastest('auto'):.2f}",
        ]


def _measured_over_foreseen(cells: Sequence[Cell]) -> dict[str, list[float]]:
    """By mode that was predicted; 1 where the prediction was right."""
    found = {m: [cell.measured[m] / cell.foreseen[m] for cell in cells if cell.foreseen[m] > 0] for m in MODES}
    return {mode: ratios for mode, ratios in found.items() if ratios}


def aims(cells: Sequence[Cell]) -> list[str]:
    """One line each; at least one cell."""
    errors = [error for cell in cells for error in cell.errors.values()]
    by_mode = {mode: [cell.errors[mode] for cell in cells if mode in cell.errors] for mode in MODES}
    each = ", ".join(f"{mode} {median(of):.0%}" for mode, of in by_mode.items() if of)
    over = ", ".join(f"{mode} {median(of):.2f}" for mode, of in _measured_over_foreseen(cells).items())
    lost = [cell for cell in cells if cell.decoupled_loses]
    won = [cell for cell in cells if not cell.decoupled_loses]
    unknown = [cell for cell in lost if _drafts_elsewhere(cell.planned)]
    foregone = [cell for cell in won if not _drafts_elsewhere(cell.planned)]
    slow = [cell for cell in cells if cell.of_fastest("auto") < WITHIN]
    return [
        _aim(f"auto reaches {WITHIN:.2f} of the fastest column in every cell", not slow)
        + f" {len(cells) - len(slow)} of {len(cells)} cells; least {_least(cells, 'auto')}."
        + f" Auto has decoupled's layout, one engine, and cannot become two: of the {len(slow)} cells that miss it, the"
        f" fastest has two engines in {sum(cell.decoupled_loses for cell in slow)}. Where the fastest has one engine,"
        f" auto reaches {_least(won, 'auto')} or more." + _named(slow),
        _aim(f"median error of predictions at most {MEDIAN_ERROR:.0%}", median(errors) <= MEDIAN_ERROR)
        + f" {median(errors):.0%}, largest {max(errors):.0%}; median by column: {each}. Measured over"
        f" predicted, median by column: {over}; off's is how much slower the machine was than while it was profiled.",
        _aim("where decoupled loses, the planner plans something else", not unknown)
        + f" Decoupled, with branches or without, loses in {len(lost)} of {len(cells)} cells, and the planner knew it"
        f" in {len(lost) - len(unknown)} of these; it wins in {len(won)}, and was planned in"
        f" {len(won) - len(foregone)} of these." + _named(unknown),
        _aim(
            f"the planned mode reaches {WITHIN:.2f} of the fastest in every cell",
            all(cell.of_fastest(cell.planned) >= WITHIN for cell in cells),
        )
        + f" {sum(cell.of_fastest(cell.planned) >= WITHIN for cell in cells)} of {len(cells)} cells; least"
        f" {min(cell.of_fastest(cell.planned) for cell in cells):.2f}.",
    ]


def _drafts_elsewhere(plan: str) -> bool:
    return plan in ("decoupled", "pre-drafting")


def _aim(text: str, met: bool) -> str:
    return f"{'Met' if met else 'MISSED'}: {text}."


def _least(cells: Sequence[Cell], mode: str) -> str:
    return f"{min(cell.of_fastest(mode) for cell in cells):.2f}" if cells else "-"


def _named(cells: Sequence[Cell]) -> str:
    return f" Missed by: {'; '.join(cell.name for cell in cells)}." if cells else ""


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
