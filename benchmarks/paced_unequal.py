"""Unequal devices and links, played on a clock (`clocked`): the plan by costs beside the best way in hindsight.

    python -m benchmarks.paced_unequal [--page-only]        docs/results/paced_unequal.csv, .md, .svg

Invariant: the choice knows cost tables, mean acceptance and delays, and nothing of what was played.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.clocked import HOST_S, coupled, decoupled, message_s, off_s
from benchmarks.paced_devices import MAX_WINDOW, Setting, published
from benchmarks.paced_engine import DevicePace
from benchmarks.paced_settings import L20, steps_of
from benchmarks.plots import STYLE, dots
from benchmarks.results import RESULTS, Result, publish, stored
from specactor.planning.plans import Cluster, DrafterEngine, DrafterOption, Mode, VerifierOption
from specactor.planning.search import search
from specactor.rollout.speculation.costs import CostTable, Grid

TARGET, CONTEXT, DEVICES = "Qwen2.5-32B", 1024, 8
DRAFTS = ("Qwen2.5-0.5B", "Qwen2.5-1.5B")
LINKS_MS = (0.1, 10.0)
BATCHES = (8, 64)
DILATION = 20.0
SEEDS = 4
NEAR = 0.97  # of the best in hindsight
DRAFTER = "draft model"
FIRST, LAST, OWN = "decoupled, the second group drafts", "decoupled, the first group drafts", "decoupled, an L20 drafts"
WAYS = ("coupled", FIRST, LAST, OWN)
"""Beside plain decoding, which is 1."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Devices, a link, and the ways in which they can decode."""

    devices: str
    draft: str
    setting: Setting  # of off and coupled: all groups verify
    ways: dict[str, Setting]


def cells() -> list[Cell]:
    """Return every mix of devices with every draft model, batch and link."""
    mixes = {
        "8 H100, an L20": ("H100",),
        "2 x 8 H100, an L20": ("H100", "H100"),
        "8 H200, 8 H100, an L20": ("H200", "H100"),
    }
    return [
        cell(devices, gpus, draft, batch, link_ms, own=True)
        for devices, gpus in mixes.items()
        for draft in DRAFTS
        for batch in BATCHES
        for link_ms in LINKS_MS
    ]


def cell(devices: str, gpus: Sequence[str], draft: str, batch: int, link_ms: float, *, own: bool) -> Cell:
    paces = tuple(
        published(TARGET, draft, gpu, devices=DEVICES, context=CONTEXT, most=batch, dilation=DILATION) for gpu in gpus
    )
    setting = Setting(
        name=f"{devices}, {draft}, batch {batch}, {link_ms:g} ms",
        pace=paces[0],
        paces=paces,
        groups=len(gpus),
        batch=batch,
        spread=0.1,
        tokens=64,
        link_s=1e-3 * link_ms,
    )
    ways = {"coupled": setting}
    if len(gpus) > 1:
        ways[FIRST] = setting
        if len(set(gpus)) > 1:
            ways[LAST] = replace(setting, pace=paces[-1], paces=paces[::-1])
    if own:
        ways[OWN] = replace(setting, drafter=steps_of(draft, L20, context=CONTEXT, most=4 * batch))
    return Cell(devices=devices, draft=draft, setting=setting, ways=ways)


def played(setting: Setting, way: str) -> float:
    """Return tokens/s over plain decoding on all groups, a mean of batches."""
    plays = [
        coupled(setting, seed=seed) if way == "coupled" else decoupled(setting, runner_up=setting.runner_up, seed=seed)
        for seed in range(SEEDS)
    ]
    return fmean(play.over_off for play in plays)


# --------------------------------------------------------------------------------------------------- what costs say


def believed(cell: Cell) -> dict[str, float]:
    """Return tokens/s over plain decoding of every way, by `specactor plan`'s search.

    It knows devices of one kind, so each group is asked for its own share of the requests, and the slowest counts.
    """
    plain_s = max(_seconds(cell.setting, group, "off") for group in range(cell.setting.groups))
    found = {"off": 1.0}
    for way, setting in cell.ways.items():
        mode: Mode = "coupled" if way == "coupled" else "decoupled"
        groups = range(setting.groups if mode == "coupled" else setting.verifiers)
        found[way] = plain_s / max(_seconds(setting, group, mode) for group in groups)
    return found


def _seconds(setting: Setting, group: int, mode: Mode) -> float:
    """Return the seconds of a token of each request that the group has, by its best plan of a mode; for ever where it
    has none."""
    verifying = setting.verifiers if mode == "decoupled" else setting.groups
    each = -(-setting.batch // verifying)
    pace = setting.of_group(group)
    step_s = setting.step_s(setting.batch)[-1] / pace.dilation
    survival = tuple(setting.acceptance**j for j in range(1, MAX_WINDOW + 1))
    token_s = Grid(requests=(1.0,), per_request=(1.0,), seconds=((step_s,),))  # of all requests, whoever verifies them
    elsewhere = DrafterEngine(devices=1, seconds=pace.draft, token_s=token_s)
    option = VerifierOption(devices=1, costs=_table(pace))
    drafter = DrafterOption(name=DRAFTER, survival=survival, engines=(elsewhere,) if mode == "decoupled" else ())
    plans = search(
        Cluster(devices=1 + (mode == "decoupled"), requests=each, message_s=2 * message_s(setting) / pace.dilation),
        [option],
        [drafter],
        max_window=MAX_WINDOW,
    )
    return min((each / plan.tokens_per_s for plan in plans if plan.mode == mode), default=float("inf"))


def _table(pace: DevicePace) -> CostTable:
    """Return what a profile of such an engine would say, what is between two passes included."""

    def with_host(grid: Grid) -> Grid:
        host_s = HOST_S / pace.dilation
        return replace(grid, seconds=tuple(tuple(each + host_s for each in row) for row in grid.seconds))

    return CostTable(
        model=TARGET,
        device="",
        date="",
        verify=with_host(pace.verify),
        plain=with_host(pace.plain),
        drafters={DRAFTER: pace.draft},
    )


def chosen(beliefs: dict[str, float]) -> str:
    """Return the way that costs speak for; plain decoding wins ties."""
    return max(beliefs, key=lambda way: beliefs[way])


# ---------------------------------------------------------------------------------------------------------- the page

COLUMNS = (
    "devices",
    "draft model",
    "batch",
    "link, ms",
    "plain pass, ms",
    "draft step of the drafter, ms",
    *WAYS,
    "chosen by costs",
    "believed",
    "best in hindsight",
    "of the best",
)


NAMED = 4
"""Columns that say which setting a row is of."""


def named(of: Cell) -> list[str]:
    return [of.devices, of.draft, str(of.setting.batch), f"{1e3 * of.setting.link_s:g}"]


def row(of: Cell) -> list[str]:
    setting, beliefs = of.setting, believed(of)
    over = {"off": 1.0} | {way: played(its, way) for way, its in of.ways.items()}
    choice, best = chosen(beliefs), max(over, key=lambda way: over[way])
    drafting = of.ways.get(OWN, setting)
    return [
        *named(of),
        f"{1e3 * off_s(setting) / (setting.tokens - 1) / DILATION:.2f}",
        f"{1e3 * drafting.step_s(setting.batch)[-1] / DILATION:.2f}",
        *(f"{over[way]:.2f}" if way in over else "-" for way in WAYS),
        choice,
        f"{beliefs[choice]:.2f}",
        best,
        f"{over[choice] / over[best]:.2f}",
    ]


INTRO = f"""\
Played on a clock, not measured, as [on equal devices](paced_clock.md): {TARGET}, {CONTEXT} tokens of context, \
{DEVICES} devices a group, groups in the order named, acceptance .8 ± .1, of second choices .5. Groups have \
equal shares of the requests, as engines of a run have, so that the slowest counts. Tokens/s over plain decoding \
on all groups, means of {SEEDS} batches with their ends; an L20 drafts alone, and comes on top. The link delays \
messages of a drafter elsewhere, one way; all times before a dilation of {DILATION:g}. A plain pass contains \
{1e3 * HOST_S / DILATION:g} ms of the host. *Chosen by costs*: the way for which the search of `specactor plan` \
foresees most, given the cost tables, the mean acceptance and the link; *believed*: how much. It knows devices \
of one kind and is asked for each group; of second choices it knows nothing."""


def verdict(rows: Sequence[Sequence[str]]) -> str:
    shares = [float(found[-1]) for found in rows]
    near = sum(share >= NEAR for share in shares)
    worst = min(rows, key=lambda found: float(found[-1]))
    wins = [found for found in rows if found[-2].startswith("decoupled")]
    own = sum(found[-2] == OWN for found in rows)
    errors = [100 * (float(found[-3]) / _of_choice(found) - 1) for found in rows]
    return (
        f"The plan by costs is within {100 * (1 - NEAR):.0f} % of the best in hindsight in {near} of {len(rows)} "
        f"settings (median {median(shares):.2f} of it, least {min(shares):.2f}: {', '.join(worst[:4])} ms). Decoupled "
        f"drafting is best in {len(wins)}, with an L20 as the drafter in {own}; behind {max(LINKS_MS):g} ms in "
        f"{sum(found[3] == f'{max(LINKS_MS):g}' for found in wins)}. What it believes of its choice is off by "
        f"{min(errors):+.0f} to {max(errors):+.0f} % (median {median(errors):+.0f} %)."
    )


def _of_choice(found: Sequence[str]) -> float:
    """Return how fast the way that costs spoke for was played."""
    choice = found[COLUMNS.index("chosen by costs")]
    return 1.0 if choice == "off" else float(found[COLUMNS.index(choice)])


def draw(rows: Sequence[Sequence[str]], path: Path) -> None:
    """Draw the speed of every way, a line per setting; plain decoding is the dotted line."""
    labels = [f"{', '.join(found[:3])}, {found[3]} ms" for found in rows]
    ways = {way: [found[COLUMNS.index(way)] for found in rows] for way in WAYS}
    with rc_context(STYLE):
        figure = Figure(figsize=(8.6, 6.4), layout="constrained")
        axes = figure.add_subplot()
        dots(axes, labels, ways, line=1.0)
        axes.set_xlabel("tokens/s over off on all groups")
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--page-only", action="store_true", help="play nothing, write the page of stored rows again")
    there: dict[tuple[str, ...], list[str]] = {}
    if parser.parse_args().page_only:
        there = {tuple(known.values())[:NAMED]: [*known.values()] for known in stored("paced_unequal")}
    rows = []
    for of in cells():
        rows.append(there[tuple(named(of))] if there else row(of))
        print("  ".join(rows[-1]), flush=True)
    draw(rows, RESULTS / "paced_unequal.svg")
    publish(
        "paced_unequal",
        Result(
            title="Unequal devices and links, on a clock",
            verdict=verdict(rows),
            intro=INTRO,
            columns=COLUMNS,
            rows=rows,
            picture="![Speed of every way on unequal devices](paced_unequal.svg)",
            source="Nothing was measured.",
        ),
    )


if __name__ == "__main__":
    main()
