"""The page of `speculation_speed`: its table, and whether the aims were met. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from benchmarks.results import Result, Table

PLAIN, AUTO = "plain", "auto"
SMALL_BATCH, SMALL_BATCH_AIM = 4, 2.0
MIDDLE_BATCH, MIDDLE_BATCH_AIM = 16, 1.3
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
    ratio: float  # over plain decoding in the same repetition, median over repetitions
    accept_length: float  # emitted / verifies; 0 where nothing was verified
    repetitions: int = 1

    @property
    def text(self) -> str:
        """As in the table."""
        if self.name == PLAIN:
            return f"{self.tokens_per_s:.0f} tok/s"
        return f"{self.ratio:.2f}" + (f" ({self.accept_length:.1f})" if self.accept_length else "")


def misses(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Every aim, and where it was missed, the worst first. Aims of which no cell was measured are left out."""
    auto = [cell for cell in cells if cell.name == AUTO]
    own = {(cell.model, cell.phase, cell.batch): cell.ratio for cell in auto}
    builtins = [cell for cell in cells if cell.name.startswith("SGLang ")]
    small = [cell for cell in auto if cell.batch <= SMALL_BATCH]
    middle = [cell for cell in auto if cell.batch == MIDDLE_BATCH]
    beside = [cell for cell in builtins if (cell.model, cell.phase, cell.batch) in own]
    aims: dict[str, list[str]] = {}
    for text, cells_of_aim, aim in (
        (f"auto at least {SMALL_BATCH_AIM} of plain at batch 1-{SMALL_BATCH}", small, SMALL_BATCH_AIM),
        (f"auto at least {MIDDLE_BATCH_AIM} of plain at batch {MIDDLE_BATCH}", middle, MIDDLE_BATCH_AIM),
        (f"auto never under {FLOOR} of plain", auto, FLOOR),
    ):
        if cells_of_aim:
            slow = sorted((cell for cell in cells_of_aim if cell.ratio < aim), key=lambda cell: cell.ratio)
            aims[text] = [_place(cell, cell.ratio) for cell in slow]
    if beside:
        aims["auto at least every SGLang built-in at every batch"] = [
            f"{_place(cell, own[cell.model, cell.phase, cell.batch])} against {cell.name}'s {cell.ratio:.2f}"
            for cell in sorted(beside, key=lambda cell: own[cell.model, cell.phase, cell.batch] / cell.ratio)
            if own[cell.model, cell.phase, cell.batch] < cell.ratio
        ]
    return aims


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
    """`auto` and SGLang's own, those that were measured."""
    names = dict.fromkeys(cell.name for cell in cells)
    return [name for name in names if name == AUTO or name.startswith("SGLang ")]


def verdict(cells: Sequence[Cell]) -> str:
    """How fast `auto` is, and where it loses."""
    auto = [cell for cell in cells if cell.name == AUTO]
    own = {(cell.model, cell.phase, cell.batch): cell.ratio for cell in auto}
    means = ", ".join(f"{name} {shown(cells, name)}" for name in contenders(cells))
    beaten = {
        place
        for cell in cells
        if cell.name.startswith("SGLang ")
        and own.get(place := (cell.model, cell.phase, cell.batch), cell.ratio) < cell.ratio
    }
    slow = sum(cell.ratio < FLOOR for cell in auto)
    missed = sum(bool(where) for where in misses(cells).values())
    return (
        f"Tokens/s over plain SGLang, geometric mean of {len(own)} cells (smallest to largest): {means}. `auto` is "
        f"under {FLOOR} of plain decoding in {slow} cells, and slower than SGLang's NGRAM or STANDALONE in "
        f"{len(beaten)}. {missed} of {len(misses(cells))} aims are missed."
    )


def summary(cells: Sequence[Cell]) -> Table:
    """By batch."""
    names = contenders(cells)
    batches = {batch: [cell for cell in cells if cell.batch == batch] for batch in sorted({c.batch for c in cells})}
    rows = [
        [
            str(batch),
            *(shown(of, name) for name in names),
            str(sum(cell.name == AUTO and cell.ratio < FLOOR for cell in of)),
        ]
        for batch, of in batches.items()
    ]
    return ("batch", *names, f"cells of auto under {FLOOR}"), rows


def result(cells: Sequence[Cell], load: float, clock: str) -> Result:
    """The page. Args: load average before the start; what measured the seconds."""
    columns, rows = table(cells)
    per_model = ", ".join(f"{model} {n}" for model, n in {cell.model: cell.repetitions for cell in cells}.items())
    aims = []
    for aim, where in misses(cells).items():
        places = f": {'; '.join(where)}" if len(where) <= FEW else f", most at {where[0]}" if where else ""
        aims.append(f"- {aim}: {f'missed {len(where)} times{places}' if where else 'met'}.")
    return Result(
        title="Speed of speculation",
        verdict=verdict(cells),
        intro=(
            "A cell is 8 responses to each of max(1, batch / 8) prompts, `batch` requests at once, temperature 1, at "
            "most 64 tokens. `cold`: new prompts. `warm`: 8 further responses to the same prompts, so drafters over "
            "text know the first ones; weights do not change in between, which spares SGLang's NGRAM the loss of its "
            "corpus. Models, "
            "float32: the quickstart's, trained on task A (count_bits, little entropy) or B (sums, more entropy), and "
            "`heavy`, B's with 100 M parameters that compute the same function; the draft model is one dense layer, "
            "distilled from the target. A figure is tokens/s over plain SGLang in the same repetition, median of "
            f"repetitions in turns on one core ({per_model}), by {clock}. In the file of all rows accept_length (over "
            "rounds with drafts) stands in brackets; `off` is able to speculate and does not; `suffix` and `model` "
            "choose windows up to 8 by predicted speed; `auto` chooses among both and plain decoding. All emit as many "
            "tokens, ours the same ones, which is checked."
        ),
        columns=columns,
        rows=rows,
        summary=summary(cells),
        notes="\n".join(["Aims:", "", *aims, "", f"{NOTES} Load average before the start: {load:.1f}."]),
    )
