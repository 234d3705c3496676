"""The page of `speculation_speed`: its table, and whether the aims were met. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from benchmarks.results import Result, Table, interval, likely

PLAIN, AUTO = "plain", "auto"
SHOWN = ("suffix", "model", "head", AUTO)
MEAN_AIM = 1.9  # of `auto` over plain, geometric mean of all cells
FEWEST = 6  # repetitions whose median has a 95 % interval
FEW = 5  # cells that a missed aim names; more are counted
FLOOR = 0.98  # of plain decoding, that `auto` never falls below
NOTES = (
    "SGLang's NGRAM (8 rows per verify) and STANDALONE (3 steps, topk 1) run on stand-ins for unpublished CPU kernels, "
    "with one attention call per layer and batch and the rejection sampling that SGLang has on GPUs. With drafts a "
    "round of `heavy` takes much longer, since every row of a draft goes through other experts ([where a round's time "
    "goes](speculation_speed_profile.md)). Below batch 8 a cell is one prompt per repetition, so cells differ by their "
    "prompts; from 16 on a step is over after some tens of rounds, in which `auto` has to learn what prompts bring."
)
"""What explains the table."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A contestant at one batch size."""

    model: str
    phase: str  # cold or warm
    batch: int
    name: str
    tokens_per_s: float  # median over repetitions
    ratios: tuple[float, ...]  # over plain decoding, of each repetition
    accept_length: float  # emitted / verifies; 0 where nothing was verified

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def place(self) -> tuple[str, str, int]:
        return self.model, self.phase, self.batch

    @property
    def text(self) -> str:
        """As in the table."""
        if self.name == PLAIN:
            return f"{self.tokens_per_s:.0f} tok/s"
        found = likely(self.ratios) if len(self.ratios) >= FEWEST else f"{self.ratio:.2f}"
        return found + (f"; {self.accept_length:.1f}" if self.accept_length else "")


def below(ratios: Sequence[float], bound: float) -> bool:
    """Whether the whole 95 % interval of the median is below a bound; fewer than six repetitions have none."""
    return len(ratios) >= FEWEST and interval(ratios)[1] < bound


def reaches(ratios: Sequence[float], bound: float) -> bool:
    """Whether the whole interval reaches it."""
    return len(ratios) >= FEWEST and interval(ratios)[0] >= bound


def against(one: Cell, other: Cell) -> list[float]:
    """How much faster one is, of each repetition."""
    return [a / b for a, b in zip(one.ratios, other.ratios, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What became of one: `missed` where the whole interval misses it, the worst first; `open` are cells whose interval
    holds the bound."""

    text: str
    cells: int
    missed: tuple[str, ...]
    open: int

    def __str__(self) -> str:
        if not self.missed:
            return f"- {self.text}: " + (f"open in {self.open} of {self.cells}." if self.open else "met.")
        named = f": {'; '.join(self.missed)}" if len(self.missed) <= FEW else f", most at {self.missed[0]}"
        return f"- {self.text}: missed in {len(self.missed)} of {self.cells}{named}. Open in {self.open}."


def aims(cells: Sequence[Cell]) -> list[Aim]:
    """Aims of which cells were measured."""
    auto = {cell.place: cell for cell in cells if cell.name == AUTO}
    beside = [cell for cell in cells if cell.name.startswith("SGLang ") and cell.place in auto]
    if not auto:
        return []
    of_plain = [(cell.ratios, _place(cell, cell.ratio)) for cell in auto.values()]
    means = [geometric_mean(of_all) for of_all in zip(*(cell.ratios for cell in auto.values()), strict=True)]
    mean = geometric_mean([cell.ratio for cell in auto.values()])  # as in the verdict
    of_builtins = [
        (against(own := auto[cell.place], cell), f"{_place(own, own.ratio)} against {cell.name}'s {cell.ratio:.2f}")
        for cell in beside
    ]
    found = [
        _aim(f"auto never under {FLOOR} of plain", of_plain, FLOOR),
        _aim(f"geometric mean of auto over all cells at least {MEAN_AIM}", [(means, f"{mean:.2f}")], MEAN_AIM),
    ]
    return found + ([_aim("auto never under a built-in of SGLang", of_builtins, 1.0)] if beside else [])


def _aim(text: str, cells: Sequence[tuple[Sequence[float], str]], bound: float) -> Aim:
    missed = sorted((median(ratios), name) for ratios, name in cells if below(ratios, bound))
    met = sum(reaches(ratios, bound) for ratios, _ in cells)
    return Aim(
        text=text, cells=len(cells), missed=tuple(name for _, name in missed), open=len(cells) - met - len(missed)
    )


def _place(cell: Cell, ratio: float) -> str:
    return f"{cell.model}, batch {cell.batch}, {cell.phase}: {ratio:.2f}"


def table(cells: Sequence[Cell]) -> tuple[tuple[str, ...], list[list[str]]]:
    """(columns, rows): a row per model, phase and batch; a column per contestant, "-" where it was not measured."""
    names = list(dict.fromkeys(cell.name for cell in cells))
    by_place: dict[tuple[str, str, int], dict[str, str]] = {}
    for cell in cells:
        by_place.setdefault((cell.model, cell.phase, cell.batch), {})[cell.name] = cell.text
    places = sorted(by_place, key=lambda place: ([c.model for c in cells].index(place[0]), place[1], place[2]))
    rows = [
        [model, phase, str(batch), *(by_place[model, phase, batch].get(name, "-") for name in names)]
        for model, phase, batch in places
    ]
    return ("model", "step", "batch", *names), rows


def shown(cells: Sequence[Cell], name: str) -> str:
    """geometric mean (smallest to largest) of a contestant's ratios."""
    ratios = [cell.ratio for cell in cells if cell.name == name]
    return f"{geometric_mean(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "-"


def contenders(cells: Sequence[Cell]) -> list[str]:
    """Those of the verdict and the first table, that were measured."""
    names = dict.fromkeys(cell.name for cell in cells)
    return [name for name in names if name in SHOWN or name.startswith("SGLang ")]


def verdict(cells: Sequence[Cell]) -> str:
    """How fast `auto` is, and where it loses."""
    auto = {cell.place: cell for cell in cells if cell.name == AUTO}
    means = ", ".join(f"{name} {shown(cells, name)}" for name in contenders(cells))
    beside = [cell for cell in cells if cell.name.startswith("SGLang ") and cell.place in auto]
    slower = {cell.place for cell in beside if below(against(auto[cell.place], cell), 1.0)}
    faster = {cell.place for cell in beside if below(against(cell, auto[cell.place]), 1.0)} - slower
    slow = sum(below(cell.ratios, FLOOR) for cell in auto.values())
    return (
        f"Tokens/s over plain SGLang, geometric mean of {len(auto)} cells (smallest to largest): {means}. `auto` is "
        f"under {FLOOR} of plain decoding in {slow} cells, slower than SGLang's NGRAM or STANDALONE in {len(slower)}, "
        f"and faster than one and slower than none in {len(faster)}, by whole 95 % intervals."
    )


def summary(cells: Sequence[Cell]) -> Table:
    """By batch."""
    names = contenders(cells)
    batches = {batch: [cell for cell in cells if cell.batch == batch] for batch in sorted({c.batch for c in cells})}
    rows = [
        [
            str(batch),
            *(shown(of, name) for name in names),
            str(sum(cell.name == AUTO and below(cell.ratios, FLOOR) for cell in of)),
        ]
        for batch, of in batches.items()
    ]
    return ("batch", *names, f"cells of auto under {FLOOR}"), rows


def result(cells: Sequence[Cell], load: float, clock: str) -> Result:
    """The page. Args: load average before the start; what measured the seconds."""
    columns, rows = table(cells)
    per_model = ", ".join(f"{model} {n}" for model, n in {cell.model: len(cell.ratios) for cell in cells}.items())
    return Result(
        title="Speed of speculation",
        verdict=verdict(cells),
        intro=(
            "A cell is 8 responses to each of max(1, batch / 8) prompts, `batch` requests at once, temperature 1, "
            "at most 64 tokens. `cold`: new prompts. `warm`: 8 further responses to the same prompts, so drafters "
            "over text know the first ones; weights do not change in between, which spares SGLang's NGRAM the loss "
            "of its corpus. Models, float32: the quickstart's, trained on task A (count_bits, little entropy) or B "
            "(sums, more entropy), and `heavy`, B's with 100 M parameters that compute the same function; the draft "
            "model is one dense layer, and `head` an EAGLE-3 head, both distilled from the target. A figure is "
            "tokens/s over plain SGLang in the same repetition, median of repetitions in turns on one core "
            f"({per_model}), by {clock}. In the file of all rows, 95 % intervals stand in brackets, and "
            "accept_length (over rounds with drafts) behind; `off` is able to speculate and does not; `suffix`, "
            "`model` and `head` choose windows up to 8 by predicted speed; `auto` chooses among all three and plain "
            "decoding. All emit as many tokens, ours the same ones, which is checked."
        ),
        columns=columns,
        rows=rows,
        summary=summary(cells),
        notes="\n".join(
            ["Aims:", "", *map(str, aims(cells)), "", f"{NOTES} Load average before the start: {load:.1f}."]
        ),
    )
