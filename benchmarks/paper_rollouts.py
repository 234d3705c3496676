"""Rollouts and RL steps in the settings of arXiv 2511.16193, simulated: speed-ups, an ablation, and what they hang on.

Nothing is timed: every second is a roofline's, moved by the simulator's events (`specactor/simulator/`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.paper_plans import slowed
from benchmarks.results import Result, publish
from specactor.planning.model_shapes import SHAPES
from specactor.planning.rooflines import device, from_figures
from specactor.simulator.command import MFU, trained_per_s
from specactor.simulator.engine import Policy
from specactor.simulator.requests import Lengths, Method, World
from specactor.simulator.rollout import Job, Run, run

CONTEXT = 4096
GROUP = 16
MAX_WINDOW = 8
VANILLA = 4  # window of vanilla speculation: fixed, coupled
MODELS = (
    ("Qwen2.5-32B", 4, {"Qwen2.5-0.5B": 0.68, "Qwen2.5-1.5B": 0.75}),
    ("Qwen3-235B-A22B", 8, {"Qwen3-0.6B": 0.68, "Qwen3-4B": 0.78}),
)
"""Target, GPUs of a worker, and drafters with the assumed acceptance of their first draft token."""
GREEDY = 0.75  # acceptance without shared noise over that with it, at temperature 1. Assumed
COLUMNS = (
    *("setting", "plain s", "vanilla", "decoupled", "auto", "auto, keys once"),
    *("auto over vanilla", "step, over plain", "auto's plan"),
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row."""

    name: str
    target: str = MODELS[0][0]
    engine: int = MODELS[0][1]
    rates: Mapping[str, float]
    batch: int = 128  # requests per worker
    step_ms: float = 4.0  # what a draft step takes beside the roofline's seconds
    round_ms: float = 0.0  # the same of a verifier's round
    sigma: float = 1.0
    steps: int = 1
    refresh: bool = False

    def job(self, devices: int, *, keys_once: bool = False) -> Job:
        methods = {name: Method(rate=rate, drift=0.01, staleness=0.05) for name, rate in self.rates.items()}
        found = from_figures(
            SHAPES[self.target],
            [SHAPES[name] for name in methods],
            device("H100"),
            survivals={name: method.survival(MAX_WINDOW + 1) for name, method in methods.items()},
            context=CONTEXT,
            max_requests=2048,
            sizes=(self.engine,),
            drafter_sizes=(1, 2, 4),
            keys_once=keys_once,
            host_s=(self.round_ms * 1e-3, self.round_ms * 1e-3),
        )
        found = slowed(found, self.step_ms * 1e-3)
        return Job(
            devices=devices,
            prompts=max(1, devices // self.engine * self.batch // GROUP),
            group_size=GROUP,
            lengths=Lengths(median=4000, sigma=self.sigma, longest=20000),
            options=found,
            world=World(methods=methods, jitter=0.02),
            policy=Policy(max_window=MAX_WINDOW),
            train_tokens_per_s=trained_per_s(SHAPES[self.target], device("H100")),
            refresh=self.refresh,
            steps=self.steps,
        )


OFF = Policy(mode="off", max_window=MAX_WINDOW)
COUPLED = Policy(mode="coupled", window=VANILLA, max_window=MAX_WINDOW)
AHEAD = Policy(mode="decoupled", max_window=MAX_WINDOW)
AUTO = Policy(max_window=MAX_WINDOW)


def runs(setting: Setting, devices: int) -> tuple[Run, Run, Run, Run]:
    job = setting.job(devices)
    plain = run(replace(job, policy=OFF, refresh=False))
    return plain, run(replace(job, policy=COUPLED)), run(replace(job, policy=AHEAD)), run(replace(job, policy=AUTO))


def row(setting: Setting, devices: int) -> list[str]:
    plain, vanilla, ahead, auto = runs(setting, devices)
    once = run(replace(setting.job(devices, keys_once=True), policy=AUTO))
    plan = auto.plan
    counts = f"{plan.verifiers.engines}x{plan.verifiers.devices_each}"
    counts += f" + {plan.drafters.engines}x{plan.drafters.devices_each}" if plan.drafters.engines else ""
    return [
        setting.name,
        f"{plain.rollout_s / setting.steps:.0f}",
        *(f"{plain.rollout_s / of.rollout_s:.2f}" for of in (vanilla, ahead, auto, once)),
        f"{vanilla.rollout_s / auto.rollout_s:.2f}",
        f"{plain.seconds / auto.seconds:.2f}",
        f"{plan.mode} {plan.drafter} w={plan.window}, {counts}" if plan.window else f"off, {counts}",
    ]


def main_settings() -> list[Setting]:
    return [
        Setting(
            name=f"{target}, batch {batch}, draft step + {step_ms:g} ms",
            target=target,
            engine=engine,
            rates=rates,
            batch=batch,
            step_ms=step_ms,
        )
        for (target, engine, rates), batch, step_ms in product(MODELS, (128, 256), (0.0, 4.0))
    ]


def sensitivity() -> list[Setting]:
    rates = MODELS[0][2]
    found = [Setting(name=f"32B, acceptance {p:g}", rates=dict.fromkeys(rates, p)) for p in (0.4, 0.6, 0.8, 0.9)]
    found += [Setting(name=f"32B, draft step + {ms:g} ms", rates=rates, step_ms=ms) for ms in (0.0, 2.0, 8.0)]
    found += [Setting(name=f"32B, verifier's round + {ms:g} ms", rates=rates, round_ms=ms) for ms in (10.0, 30.0)]
    found += [Setting(name=f"32B, lengths with sigma {s:g}", rates=rates, sigma=s) for s in (0.5, 1.5)]
    return found


def ablation(devices: int) -> list[str]:
    """Lines of a table: rollouts over plain, with one thing after the other."""
    lines = ["| variant | " + " | ".join(target for target, *_ in MODELS) + " |", "| --- | --- | --- |"]
    variants: list[tuple[str, Policy, float, bool]] = [
        ("vanilla: coupled, window 4, greedy drafts", COUPLED, GREEDY, False),
        ("vanilla, drafts with the target's noise", COUPLED, 1.0, False),
        ("decoupled plan, greedy drafts", AHEAD, GREEDY, False),
        ("decoupled plan, shared noise", AHEAD, 1.0, False),
        ("decoupled plan, reconfiguration", replace(AUTO, placement="decoupled"), 1.0, False),
        ("best plan, fixed", replace(AUTO, reconfigure=False), 1.0, False),
        ("best plan, reconfiguration", AUTO, 1.0, False),
        ("the same, drafter refreshed after each step", AUTO, 1.0, True),
    ]
    plain = [run(replace(_ablated(model, 1.0, False).job(devices), policy=OFF)) for model in MODELS]
    for name, policy, share, refresh in variants:
        cells = []
        for model, off in zip(MODELS, plain, strict=True):
            of = run(replace(_ablated(model, share, refresh).job(devices), policy=policy))
            cells.append(f"{off.rollout_s / of.rollout_s:.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _ablated(model: tuple[str, int, dict[str, float]], share: float, refresh: bool) -> Setting:
    target, engine, rates = model
    return Setting(
        name="",
        target=target,
        engine=engine,
        rates={name: share * rate for name, rate in rates.items()},
        steps=4,
        refresh=refresh,
    )


def intro(devices: int) -> str:
    rates = "; ".join(
        f"{target} on {engine} GPUs with {', '.join(f'{n} ({p:g})' for n, p in r.items())}"
        for target, engine, r in MODELS
    )
    return (
        f"{devices} H100 by published figures (see [plans](paper_plans.md)); "
        f"{rates}: in brackets the assumed probability that a first draft token is accepted, for the median request. "
        "It falls by 2 % per position and 1 % per 1,000 tokens, and differs among requests (log-odds with a standard "
        f"deviation of 0.5). Lengths are log-normal, median 4,000 tokens, sigma 1, cut at 20,000, groups of {GROUP}; "
        f"{CONTEXT} tokens of context; engines differ by 2 %; training at {MFU:.0%} of the peak. `vanilla`: coupled, "
        f"window {VANILLA}; `decoupled`: the best such plan; `auto`: best plan, reconfiguration. Figures are "
        "over plain, of the rollout or (`step`) end to end. `draft step + N ms`: beside the roofline's seconds."
    )


def shown(cells: Sequence[str]) -> list[str]:
    """What the page shows of a row; the file has the rest."""
    return [cells[0], *cells[2:-1]]


def verdict(rows: Sequence[Sequence[str]]) -> str:
    """What `auto` gains, beside what the paper reports."""

    def of(name: str) -> list[float]:
        return [float(row[COLUMNS.index(name)]) for row in rows]

    gains, over, steps = of("auto"), of("auto over vanilla"), of("step, over plain")
    once = of("auto, keys once")
    behind = sum(ahead > auto for ahead, auto in zip(of("decoupled"), gains, strict=True))
    return (
        f"**Simulated, not measured.** With `auto` rollouts are {min(gains):.2f} to {max(gains):.2f} times as fast as "
        f"plain ones ({min(over):.2f} to {max(over):.2f} times vanilla speculation; {min(once):.2f} to "
        f"{max(once):.2f} if a verification read a request's keys once and not per row), steps {min(steps):.2f} to "
        f"{max(steps):.2f} times; the paper reports 2.0-2.4 (1.1-2.6) and 1.4-2.3. A fixed decoupled plan beats `auto` "
        f"in {behind} of {len(rows)} rows."
    )


NOTES = """Ablation, batch 128, draft step + 4 ms, four steps with a drafter that loses 5 % of its acceptance per step
unless it is refreshed; rollouts over plain:

{ablation}

- Every row of a verification reads its request's keys, as ours does ([plans](paper_plans.md)); a GPU's cache may spare
  some of that. An earlier page assumed that keys are read once.
- `auto` is below plain decoding in one setting, by 1 %; a fixed window of 4 is in all rows but one.
- Shared noise helps; its effect on acceptance (1 / 0.75) was assumed. Reconfiguration adds up to 5 %, refreshing 2 %;
  of one seed, so 1 or 2 % may be nothing.
- A fixed decoupled plan beats `auto` in three rows. With 30 ms more per round by 4 %: `auto` makes the engines fastest,
  so requests end 4 % earlier on average, and lets a long one with bad drafts wait for rounds that others make longer
  (a test). With 8 ms more per draft step by 3 %: the plan helps the last requests alone, and on average they end 9 %
  later. With an acceptance of 0.9 by rounding.
- Acceptance, its spread, lengths and what rounds cost beside a roofline are assumptions; the paper's figures were not
  at hand. The context is one average, prefills are left out.

So this neither reproduces nor refutes the paper's figures: its inputs are ours."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--devices", type=int, default=64, help="GPUs; workers have the same batch with any number")
    options = parser.parse_args(arguments)
    rows = [row(setting, options.devices) for setting in (*main_settings(), *sensitivity())]
    notes = NOTES.format(ablation="\n".join(ablation(options.devices)))
    publish(
        "paper_rollouts",
        Result(
            title="Rollouts in the settings of the SpecActor paper",
            verdict=verdict(rows),
            intro=intro(options.devices),
            columns=COLUMNS,
            rows=rows,
            summary=(shown(COLUMNS), [shown(of) for of in rows[: len(main_settings())]]),
            notes=notes,
            source="Simulated from published figures; nothing was timed.",
        ),
    )


if __name__ == "__main__":
    main()
