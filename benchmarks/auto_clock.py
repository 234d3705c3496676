"""What `auto` gains beside a drafter over text when a token of a slow request counts more, on a clock.

    python -m benchmarks.auto_clock        docs/results/auto_clock.csv, .md, .svg

The shipped speculator decides as in `paced_clock`, once as it is and once with every token counting the same.

Invariant: both decode the same batches with the same drafts, and are compared pair by pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, geometric_mean
from unittest.mock import patch

from benchmarks import paced
from benchmarks.paced_clock import coupled
from benchmarks.paced_devices import Setting
from benchmarks.results import Result, interval, likely, publish
from specactor.rollout.speculation import planner

SEEDS = 16
PLACES = (0, 1, 3)  # settings of `paced`: one of set times, and two of published figures
COLUMNS = ("setting", "responses", "coupled", "auto, all tokens alike", "auto", "auto over auto, all tokens alike")


def settings() -> list[Setting]:
    """Return those of `paced`, with responses of one length and with a long tail."""
    known = [*paced.settings().values()]
    return [replace(known[k], tokens=256 if tail else 96, tail=tail) for tail in (False, True) for k in PLACES]


def alike(setting: Setting, seed: int) -> float:
    """Return what it would be if all tokens counted the same."""
    with patch.object(planner, "URGENCY", 0.0):
        return coupled(setting, seed=seed, beside_text=True).over_off


def row(setting: Setting) -> tuple[list[str], list[float]]:
    """Return the row, and how much faster each batch is."""
    before = [alike(setting, seed) for seed in range(SEEDS)]
    after = [coupled(setting, seed=seed, beside_text=True).over_off for seed in range(SEEDS)]
    alone = [coupled(setting, seed=seed).over_off for seed in range(SEEDS)]
    gains = [b / a for a, b in zip(before, after, strict=True)]
    means = [f"{fmean(values):.2f}" for values in (alone, before, after)]
    return [setting.name, "with a long tail" if setting.tail else "of one length", *means, likely(gains)], gains


def result(rows: Sequence[Sequence[str]], gains: Sequence[Sequence[float]]) -> Result:
    means = [geometric_mean(of_seed) for of_seed in zip(*gains, strict=True)]
    low, high = interval(means)
    return Result(
        title="Tokens of slow requests count more",
        verdict=(
            f"`auto` beside a drafter over text is {geometric_mean(means):.3f} ({low:.2f}-{high:.2f}) times as fast "
            f"when a token counts more the slower its request has been, geometric mean of {len(rows)} settings. A "
            "rollout ends with its slowest request, so the most tokens per second of all together are not the goal."
        ),
        intro=(
            "Played on a clock by the shipped speculator: an engine on each of two groups of devices, with a dialled "
            "draft model right with .8 and a drafter over text that costs nothing and is right with .5 ± .4, the same "
            f"for all tokens of a request. Times plain decoding, the slower group's end, means of {SEEDS} batches; in "
            "the last column medians of batches in pairs with 95 % intervals. A token counts 1 / (tokens per round of "
            f"its request so far)^{planner.URGENCY:g}; `coupled` has no drafter over text."
        ),
        columns=COLUMNS,
        rows=rows,
    )


def main() -> None:
    rows, gains = [], []
    for setting in settings():
        found, of_setting = row(setting)
        print(" | ".join(found), flush=True)
        rows.append(found)
        gains.append(of_setting)
    publish("auto_clock", result(rows, gains))


if __name__ == "__main__":
    main()
