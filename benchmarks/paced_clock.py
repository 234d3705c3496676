"""Where decoupled drafting wins on equal devices, played on a clock (`clocked`).

python -m benchmarks.paced_clock        docs/results/paced_clock.csv, .md, .svg: which way wins where
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from benchmarks import paced_settings
from benchmarks.clocked import coupled, decoupled
from benchmarks.paced_devices import MAX_WINDOW, Setting, published
from benchmarks.paced_engine import DevicePace
from benchmarks.plots import number
from benchmarks.results import Result, likely, markdown, publish
from specactor.rollout.speculation.costs import Grid

SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
GROWTHS = (0.0, 0.1, 0.25, 0.5)
PASS_S = 0.1
ACCEPTANCES = (0.6, 0.8, 0.9)
BATCH = 16
SEEDS = 4
MODELS = (
    ("Qwen2.5-32B", "Qwen2.5-0.5B", "H100", 4),
    ("Qwen2.5-32B", "Qwen2.5-1.5B", "H100", 8),
    ("Qwen3-32B", "Qwen3-4B", "H100", 8),
    ("Qwen3-235B-A22B", "Qwen3-0.6B", "H200", 8),
)
COLUMNS = (
    "setting",
    "acceptance",
    "draft step of a pass",
    "pass with twice the requests",
    "coupled",
    "decoupled, first choices",
    "decoupled",
    "turns without drafts, first choices",
    "turns without drafts",
    "fastest",
)


def growing(share: float, growth: float) -> DevicePace:
    """Return a pace whose pass takes (1 + growth) times as long with twice the requests of a group, and whose draft
    step is a share of the group's pass, whatever the requests."""
    each = float(BATCH // 2)
    sizes = (1.0, each, 4 * each)
    passes = Grid(
        requests=sizes,
        per_request=(1.0,),
        seconds=tuple((PASS_S * (1.0 - growth + growth * n / each),) for n in sizes),
    )
    windows = tuple(map(float, range(1, MAX_WINDOW + 1)))
    draft = Grid(requests=(1.0,), per_request=windows, seconds=(tuple(share * PASS_S * w for w in windows),))
    return DevicePace(plain=passes, verify=passes, draft=draft, dilation=1.0)


def settings() -> list[Setting]:
    """Return a grid of two figures that decide, then models by published figures."""
    found = [
        Setting(
            name=f"draft step {share:g} of a pass, {1 + growth:g} times a pass with twice the requests",
            pace=growing(share, growth),
            batch=BATCH,
            acceptance=acceptance,
            spread=0.05,
        )
        for acceptance in ACCEPTANCES
        for share in SHARES
        for growth in GROWTHS
    ]
    return found + [
        Setting(
            name=f"{target}, {draft}, {devices} {gpu}, {context // 1024}k, batch {batch} on {groups} groups",
            pace=published(target, draft, gpu, devices=devices, context=context, most=batch, dilation=20.0),
            batch=batch,
            groups=groups,
            spread=0.1,
            tokens=64,
        )
        for target, draft, gpu, devices in MODELS
        for context, batch, groups in ((1024, 8, 2), (4096, 64, 2), (4096, 64, 4))
    ]


def row(setting: Setting) -> list[str]:
    each = -(-setting.batch // setting.groups)
    pass_s = setting.pace.pass_s(each, each)
    plays = (
        [coupled(setting, seed=seed) for seed in range(SEEDS)],
        [decoupled(setting, runner_up=0.0, seed=seed) for seed in range(SEEDS)],
        [decoupled(setting, runner_up=setting.runner_up, seed=seed) for seed in range(SEEDS)],
    )
    over = [fmean(play.over_off for play in of) for of in plays]
    names = ("coupled", "decoupled", "decoupled")
    fastest = names[over.index(max(over))] if max(over) > 1.0 else "off"
    return [
        setting.name,
        f"{setting.acceptance:g}",
        f"{setting.pace.step_s(each)[-1] / pass_s:.3f}",
        f"{setting.pace.pass_s(2 * each, 2 * each) / pass_s:.2f}",
        *(f"{ratio:.2f}" for ratio in over),
        *(f"{fmean(play.empty for play in of):.2f}" for of in plays[1:]),
        fastest,
    ]


TEXT_SEEDS = 12
TAIL_TOKENS = 256
TEXT_COLUMNS = ("setting", "responses", "coupled", "auto", "coupled, until one ends", "auto, until one ends")


def beside_text(setting: Setting) -> list[list[str]]:
    """Return what a drafter over text is worth beside the one on the engine's device, by the responses' lengths."""
    found = []
    for kind, of in {
        "equally long": setting,
        "of a long tail": replace(setting, tail=True, tokens=TAIL_TOKENS),
    }.items():
        plays = [[coupled(of, seed=k, with_text=text) for k in range(TEXT_SEEDS)] for text in (False, True)]
        found.append(
            [
                setting.name,
                kind,
                *(likely([play.over_off for play in played]) for played in plays),
                *(likely([play.begin for play in played]) for played in plays),
            ]
        )
    return found


def described(rows: Sequence[Sequence[str]]) -> str:
    """Say what most tokens per second mean for a batch that ends with its last response."""
    over: dict[str, list[float]] = {}
    for _, kind, alone, auto, *_ in rows:
        over.setdefault(kind, []).append(number(auto) / number(alone))
    told = ", ".join(f"{min(of):.2f} to {max(of):.2f} where responses are {kind}" for kind, of in over.items())
    ahead = sum(number(row[5]) > number(row[4]) for row in rows)
    return (
        "## A drafter over text beside it\n\nMode auto takes what emits most tokens per second over all requests, so "
        "that requests which are drafted for well run ahead; but a batch ends with its last response. Over coupled "
        f"drafting alone auto has {told}; until one response ends it is faster in {ahead} of {len(rows)}. Medians of "
        f"{TEXT_SEEDS} batches with 95 % intervals, tokens/s over plain decoding; `text` drafts at no cost, right with "
        ".5 ± .4.\n\n" + markdown(TEXT_COLUMNS, rows)
    )


INTRO = f"""\
Played on a clock, not measured: the shipped ends of the decoupled protocol and the shipped speculator of coupled \
drafting, with dialled drafters; engines, sockets and all computing are left out ([measured](paced.md)). Tokens/s over \
plain decoding on equal groups of devices, means of {SEEDS} batches with their ends: `coupled`: an engine on every \
group; `decoupled`: one group drafts for the others. The grid has {BATCH} requests on 2 groups, 96 tokens each; models \
by published figures, 64 tokens each. Where a first choice is wrong, the second is right in half of the cases. What \
decides is what a draft step takes of a pass, and how much longer a pass takes with the requests of the group that \
drafts."""


def verdict(rows: Sequence[Sequence[str]]) -> str:
    wins = [found for found in rows if found[-1] == "decoupled"]
    worth = [float(found[6]) / float(found[5]) for found in rows]
    return (
        f"Decoupled drafting is the fastest way in {len(wins)} of {len(rows)} settings: where a draft step takes an "
        "eighth of a pass or more, drafts are good, and a pass hardly grows with its requests. Drafting on from second "
        f"choices makes it {min(worth):.2f} to {max(worth):.2f} times as fast, {fmean(worth):.2f} on average."
    )


def main() -> None:
    rows = []
    for setting in settings():
        rows.append(row(setting))
        print("  ".join(rows[-1]), flush=True)
    with_text = [found for setting in list(paced_settings.settings().values())[:4] for found in beside_text(setting)]
    publish(
        "paced_clock",
        Result(
            title="Where decoupled drafting wins, on a clock",
            verdict=verdict(rows),
            intro=INTRO,
            columns=COLUMNS,
            rows=rows,
            summary=(COLUMNS, [found for found in rows if found[1] == "0.8"]),
            notes=described(with_text),
            source="Nothing was measured.",
        ),
    )


if __name__ == "__main__":
    main()
