"""The page of `speculation_speed`: its table, and whether the aims were met. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.results import Result

PLAIN, AUTO = "plain", "auto"
SMALL_BATCH, SMALL_BATCH_AIM = 4, 2.0
MIDDLE_BATCH, MIDDLE_BATCH_AIM = 16, 1.3
FLOOR = 0.98
"""Of plain decoding, that `auto` never falls below."""
PROFILE = (
    "[Where a round's time goes](speculation_speed_profile.md): with draft tokens a round of `heavy` takes much "
    "longer than a plain one, since each row of a draft goes through other experts; the draft model's passes take "
    "half as long as those of a target as small as B. Below batch 8 a cell is one prompt per repetition, so cells "
    "differ by their prompts. At batch 16 and more a step is over after some tens of rounds, in which `auto` has to "
    "learn what these prompts bring."
)
"""What explains the table."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A contestant at one batch size."""

    model: str
    phase: str
    """cold or warm."""
    batch: int
    name: str
    tokens_per_s: float
    """Median over repetitions."""
    ratio: float
    """Over plain decoding in the same repetition, median over repetitions."""
    accept_length: float
    """emitted / verifies; 0 where nothing was verified."""
    repetitions: int = 1

    @property
    def text(self) -> str:
        """As in the table."""
        if self.name == PLAIN:
            return f"{self.tokens_per_s:.0f} tok/s"
        return f"{self.ratio:.2f}" + (f" ({self.accept_length:.1f})" if self.accept_length else "")


def misses(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """Every aim, and where it was missed. Aims of which no cell was measured are left out."""
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
            aims[text] = [_place(cell, cell.ratio) for cell in cells_of_aim if cell.ratio < aim]
    if beside:
        aims["auto at least every SGLang built-in at every batch"] = [
            f"{_place(cell, own[cell.model, cell.phase, cell.batch])} against {cell.name}'s {cell.ratio:.2f}"
            for cell in beside
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


def result(cells: Sequence[Cell], load: float, clock: str) -> Result:
    """The page. Args: load average before the start; what measured the seconds."""
    columns, rows = table(cells)
    per_model = ", ".join(f"{model} {n}" for model, n in {cell.model: cell.repetitions for cell in cells}.items())
    verdicts = [
        f"- {aim}: {'missed at ' + '; '.join(where) if where else 'met'}." for aim, where in misses(cells).items()
    ]
    return Result(
        title="Speed of speculation",
        intro=(
            "Tokens per second of plain SGLang; for all others the ratio to it in the same repetition, and "
            "accept_length in brackets. Medians of repetitions in which all take turns on the same core (number per "
            f"model: {per_model}), by {clock}. "
            "Models, float32: the quickstart's after its warm-up on task A (count_bits, little entropy) and on task B "
            "(sums, more entropy), and `heavy`, B's with 100 M parameters (the same function, grown by weights that "
            "add nothing); the draft model is one dense layer that was distilled from the target. Temperature 1. A "
            "cell is 8 responses to each of max(1, batch / 8) prompts, `batch` at once: below batch 8 the responses "
            "to one prompt are made in several calls, one after the other. `cold`: nobody has seen these prompts; "
            "drafters over text know responses to other prompts, and whatever of the group is written so far. "
            "`warm`: the next step, 8 further responses to the same prompts with other seeds; the responses of `cold` "
            "are history. Weights do not change between the two, which spares SGLang's NGRAM the loss of its corpus "
            "at every weight update. All emit as many tokens for each request (as many as plain decoding until its "
            "EOS, at most 64); ours emit the same tokens, which is checked. `off`: the engine is able to speculate and "
            "does not. `suffix`, `model`: windows of at most 8, chosen by predicted speed. "
            "`auto` chooses among suffix, the model and plain decoding. Costs are "
            "measured online by each contestant, in a warm-up of one repetition. accept_length is over rounds with "
            "draft tokens; SGLang's own algorithms draft in every round."
        ),
        columns=columns,
        rows=rows,
        notes="\n".join(
            [
                "Aims:",
                "",
                *verdicts,
                "",
                "SGLang's NGRAM (8 rows per verify) and STANDALONE (3 steps, topk 1) run on stand-ins for the CPU "
                "kernels that are not published, one attention call per layer and batch, and with the rejection "
                "sampling that SGLang has on GPUs (on CPUs it emits the likeliest token at any temperature). Load "
                f"average before the start: {load:.1f}. {PROFILE}",
            ]
        ),
    )
