"""Settings and contestants of `paced`, by the figures of published devices. PURE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.paced_devices import MAX_WINDOW, Setting, flat, published
from benchmarks.results import markdown
from specactor.config import SpeculationConfig
from specactor.planning.model_shapes import SHAPES
from specactor.planning.rooflines import Device, Roofline, draft_grid
from specactor.rollout.speculation.costs import Grid

DENSE = {"target": "Qwen2.5-32B", "gpu": "H100"}
EXPERTS = {"target": "Qwen3-235B-A22B", "draft": "Qwen3-0.6B", "gpu": "H200", "devices": 8, "context": 4096}

COUPLED, TEXT = "benchmarks.dialled:InEngine", "benchmarks.dialled:Text"


def ways(*drafters: str, mode: str, fastest_of: int = 1) -> SpeculationConfig:
    return SpeculationConfig(
        mode=mode,  # type: ignore[arg-type]
        drafters=drafters,
        fastest_of=fastest_of,
        max_window=MAX_WINDOW,
        draft_model=("there",),
    )


FIRST_ALONE = "decoupled, first choices alone"
AUTO, AUTO_COUPLED = "auto: decoupled or text", "auto: coupled or text"
FASTEST = "fastest of 2: decoupled and text"
TIE = 1.03  # times as fast, below which two are taken for equal
CONTESTANTS = {
    "coupled": ways(COUPLED, mode="coupled"),
    "decoupled": ways("decoupled", mode="decoupled"),
    FIRST_ALONE: ways("decoupled", mode="decoupled"),
    AUTO_COUPLED: ways(COUPLED, TEXT, mode="auto"),
    AUTO: ways("decoupled", TEXT, mode="auto"),
    FASTEST: ways("decoupled", TEXT, mode="auto", fastest_of=2),
}
OFF = SpeculationConfig()


def settings() -> dict[str, Setting]:
    """Return all, by name."""
    short = {**DENSE, "draft": "Qwen2.5-1.5B", "devices": 8, "context": 1024}
    long = {**DENSE, "draft": "Qwen2.5-0.5B", "devices": 4, "context": 4096}
    at64 = published(**long, most=64, dilation=20.0)  # type: ignore[arg-type]
    found = [
        Setting(name="a draft step takes a quarter of a pass, batch 8", pace=flat(0.080, 0.020, dilation=1.5), batch=8),
        *(
            Setting(
                name=f"32B on 8 H100, 1.5B drafts, 1k context, batch {batch}",
                pace=published(**short, most=batch, dilation=dilation),  # type: ignore[arg-type]
                batch=batch,
                spread=0.1,
                tokens=tokens,
            )
            for batch, tokens, dilation in (
                (8, 96, 30.0),
                (32, 96, 30.0),
                (64, 64, 60.0),
                (128, 64, 60.0),
                (256, 64, 60.0),
            )
        ),
        *(
            Setting(
                name=f"32B on 8 H100, 1.5B drafts, 1k context, batch {batch}, long tail",
                pace=published(**short, most=batch, dilation=60.0),  # type: ignore[arg-type]
                batch=batch,
                spread=0.1,
                tokens=128,
                tail=True,
            )
            for batch in (64, 128, 256)
        ),
        Setting(
            name="32B on 4 H100, 0.5B drafts, 4k context, batch 16",
            pace=published(**long, most=16, dilation=16.0),  # type: ignore[arg-type]
            batch=16,
            spread=0.1,
        ),
        *(
            Setting(
                name=f"the same, batch 64, {groups - 1} engines of {groups} when decoupled",
                pace=at64,
                batch=64,
                groups=groups,
                spread=0.1,
                tokens=64,
            )
            for groups in (2, 4)
        ),
        Setting(
            name="235B of experts on 8 H200, 0.6B drafts, 4k context, batch 32",
            pace=published(**EXPERTS, most=32, dilation=8.0),  # type: ignore[arg-type]
            batch=32,
            spread=0.1,
        ),
        unequal(link_ms=0.1),
    ]
    return {setting.name: setting for setting in found}


L20 = Device(
    name="L20",
    flops=119.5e12,  # a third of an L40S: https://www.taoguba.com.cn/Article/2551318/blog/Article/5364790/1
    memory_bytes=48e9,  # https://www.topcpu.net/en/gpu-c/a40-pcie-vs-l20
    memory_bytes_per_s=864e9,  # the same
    link_bytes_per_s=32e9,  # the same: PCIe 4.0 x16, one direction
)


def steps_of(draft: str, gpu: Device, *, context: int, most: int) -> Grid:
    """Return the steps of a draft model on one device of its own, for up to `most` requests."""
    roofline = Roofline(SHAPES[draft], gpu, devices=1, context=context)
    return draft_grid(roofline, max_window=MAX_WINDOW, max_requests=most)


def unequal(*, link_ms: float) -> Setting:
    """Return a setting in which an L20 drafts for eight H100."""
    draft, batch, context = "Qwen2.5-0.5B", 8, 1024
    return Setting(
        name=f"32B on 8 H100, 0.5B drafts on an L20 behind {link_ms:g} ms, 1k context, batch {batch}",
        pace=published("Qwen2.5-32B", draft, "H100", devices=8, context=context, most=batch, dilation=30.0),
        batch=batch,
        groups=1,
        spread=0.1,
        drafter=steps_of(draft, L20, context=context, most=4 * batch),
        link_s=1e-3 * link_ms,
    )


def costs(known: Sequence[Setting], dates: Mapping[str, str]) -> str:
    """Return the cost table, in milliseconds before dilation, and when each setting was measured."""
    rows = []
    for setting in known:
        engines, each = setting.groups, -(-setting.batch // setting.groups)
        own = setting.pace
        draft = own.draft if setting.drafter is None else setting.drafter
        rows.append(
            [
                setting.name,
                f"{engines} x {each}",
                f"{1e3 * own.plain.at(each, 1):.2f}",
                f"{1e3 * own.verify.at(each, 4):.2f}",
                f"{1e3 * draft.at(each, 1):.2f}",
                f"{1e3 * draft.at(setting.batch, 1):.2f}, {1e3 * draft.at(4 * setting.batch, 1):.2f}",
                f"{setting.acceptance:g} ± {setting.spread:g}",
                f"{setting.runner_up:g}",
                f"{own.dilation:g}",
                dates[setting.name],
            ]
        )
    return markdown(
        (
            "setting",
            "groups x requests",
            "plain pass",
            "4 rows per request",
            "draft step",
            "of all requests, and four times as many",
            "acceptance",
            "second choice",
            "dilation",
            "measured",
        ),
        rows,
    )
