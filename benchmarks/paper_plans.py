"""Plans at the scale of arXiv 2511.16193, predicted from published figures: what is chosen, and what it gains.

Nothing is timed: every second is a roofline's (`specactor/planning/rooflines.py`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil

import numpy as np

from benchmarks.paper_algorithms import PaperCosts, PaperPlan, plan, tgs_coupled
from benchmarks.results import RESULTS, Result, publish
from specactor.planning.model_shapes import SHAPES
from specactor.planning.plans import Candidates, Cluster, Mode, RolloutPlan, coupled_tokens, ready
from specactor.planning.rooflines import DEVICES, device, from_figures
from specactor.planning.search import search
from specactor.rollout.speculation.acceptance import survival_of
from specactor.rollout.speculation.costs import Grid

GPUS = 256
CONTEXT = 4096
MAX_WINDOW = 12
BATCHES = (8, 64, 128, 256)
RATES = (0.6, 0.8)
STEPS_MS = (1.0, 2.0, 4.0, 8.0)
MEASURED = RESULTS / "gpu" / "rows.json"
"""Milliseconds of rounds on one H100, of a tiny model, by "requests x window": there the device waits for the host."""
COLUMNS = (
    "target on",
    "p",
    "batch",
    "added to a draft step",
    "plain tok/s/GPU",
    "chosen",
    "its gain",
    "keys once: chosen",
    "gain of that",
    "coupled",
    "decoupled",
    "Algorithm 1",
    "its own prediction: over plain",
    "over coupled",
    "in our model, over plain",
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row."""

    target: str
    drafter: str
    engine: int  # GPUs of a worker
    gpu: str
    rate: float
    batch: int  # requests per worker if all GPUs verify
    step_ms: float = 0.0
    """What a draft step takes beside the roofline's seconds: launches, sampling, scheduling that nothing hides."""
    host_s: tuple[float, float] = (0.0, 0.0)  # as in `cost_table`

    @property
    def cluster(self) -> Cluster:
        return Cluster(devices=GPUS, requests=self.batch * GPUS // self.engine)

    def candidates(self, *, keys_once: bool = False) -> Candidates:
        found = from_figures(
            SHAPES[self.target],
            [SHAPES[self.drafter]],
            device(self.gpu),
            survivals={self.drafter: survival_of(self.rate, MAX_WINDOW)},
            context=CONTEXT,
            max_requests=1024,
            sizes=(self.engine,),
            drafter_sizes=[g for g in (1, 2, 4, 8) if g <= self.engine],
            keys_once=keys_once,
            host_s=self.host_s,
        )
        return slowed(found, self.step_ms * 1e-3)


def slowed(found: Candidates, step_s: float) -> Candidates:
    """With draft steps that take so much longer, wherever they run."""

    def longer(grid: Grid) -> Grid:
        more = [step_s * window for window in grid.per_request]
        return replace(grid, seconds=tuple(tuple(s + m for s, m in zip(r, more, strict=True)) for r in grid.seconds))

    return Candidates(
        verifiers=tuple(
            replace(v, costs=replace(v.costs, drafters={k: longer(g) for k, g in v.costs.drafters.items()}))
            for v in found.verifiers
        ),
        drafters=tuple(
            replace(d, engines=tuple(replace(e, seconds=longer(e.seconds)) for e in d.engines)) for d in found.drafters
        ),
    )


def row(setting: Setting) -> list[str]:
    cluster, found = setting.cluster, setting.candidates()
    ranked = search(cluster, found.verifiers, found.drafters, max_window=MAX_WINDOW)
    other = setting.candidates(keys_once=True)
    once = search(cluster, other.verifiers, other.drafters, max_window=MAX_WINDOW)[0]
    off = _of(ranked, "off")
    assert off is not None
    chosen, costs = _algorithm_1(setting, found)
    theirs = chosen.tgs * cluster.requests
    alone = ceil(setting.engine * cluster.requests / GPUS)
    coupled = max(
        tgs_coupled(costs, g_d=setting.engine, g_v=setting.engine, window=w, requests=alone, p=setting.rate)
        for w in range(1, MAX_WINDOW + 1)
    )
    plain = 1.0 / found.verifiers[0].costs.plain_s(alone)
    return [
        f"{setting.target} on {setting.engine} {setting.gpu}, {setting.drafter}",
        f"{setting.rate:g}",
        f"{setting.batch}" + ("" if off.requests_per_engine >= setting.batch else f" ({off.requests_per_engine} fit)"),
        f"{setting.step_ms:g} ms",
        f"{off.tokens_per_s_per_device:.0f}",
        _name(ranked[0]),
        f"{ranked[0].speedup:.2f}",
        _name(once),
        f"{once.speedup:.2f}",
        _cell(_of(ranked, "coupled")),
        _cell(_of(ranked, "decoupled")),
        f"{chosen.g_d}+{chosen.g_v}, w={chosen.window}",
        f"{theirs / (plain * cluster.requests):.2f}",
        f"{chosen.tgs / coupled:.2f}",
        f"{_ours_of(setting, found, chosen) / off.tokens_per_s:.2f}",
    ]


def _algorithm_1(setting: Setting, found: Candidates) -> tuple[PaperPlan, PaperCosts]:
    verifier, drafter = found.verifiers[0], found.drafters[0]
    costs = PaperCosts.fit(
        draft={e.devices: e.seconds for e in drafter.engines},
        verify={verifier.devices: verifier.costs.verify},
        max_window=MAX_WINDOW,
    )
    return plan(costs, devices=GPUS, requests=setting.cluster.requests, p=setting.rate), costs


def _ours_of(setting: Setting, found: Candidates, chosen: PaperPlan) -> float:
    """Tokens per second of Algorithm 1's plan as `search` predicts it: its groups, its window, tables, memory."""
    verifier, drafter = found.verifiers[0], found.drafters[0]
    engine = next(e for e in drafter.engines if e.devices == chosen.g_d)
    fit = verifier.requests()
    groups = GPUS // (chosen.g_d + chosen.g_v)
    b = chosen.requests if fit is None else min(chosen.requests, fit)
    share = float(ready(np.array([drafter.survival]))[0, chosen.window - 1])
    tokens = 1.0 + share * (coupled_tokens(drafter.survival, chosen.window) - 1.0)
    seconds = max(
        verifier.costs.verify.at(b, 1 + chosen.window * share),
        engine.seconds.at(b, chosen.window + 1) + setting.cluster.message_s,
    )
    return min(setting.cluster.requests, groups * b) * tokens / seconds


def _of(ranked: Sequence[RolloutPlan], mode: Mode) -> RolloutPlan | None:
    return next((found for found in ranked if found.mode == mode), None)


def _name(found: RolloutPlan) -> str:
    if found.mode == "decoupled":
        return (
            f"decoupled, {found.verifiers.engines} verifiers, {found.drafters.devices} drafter GPUs, w={found.window}"
        )
    return "off" if found.mode == "off" else f"coupled, w={found.window}"


def _cell(found: RolloutPlan | None) -> str:
    if found is None:
        return "-"
    counts = f", {found.verifiers.engines}:{found.drafters.engines}x{found.drafters.devices_each}"
    return f"{found.speedup:.2f} (w={found.window}{counts if found.mode == 'decoupled' else ''})"


def settings() -> list[Setting]:
    models = (("Qwen2.5-32B", "Qwen2.5-0.5B", 4), ("Qwen3-235B-A22B", "Qwen3-0.6B", 8))
    found = []
    for target, drafter, engine in models:
        for gpu in ("H100", "H20"):
            for rate, batch in product(RATES, BATCHES):
                found.append(Setting(target=target, drafter=drafter, engine=engine, gpu=gpu, rate=rate, batch=batch))
    target, drafter, engine = models[0]
    for batch, step_ms in product((64, 128), STEPS_MS):
        found.append(
            Setting(target=target, drafter=drafter, engine=engine, gpu="H100", rate=0.8, batch=batch, step_ms=step_ms)
        )
    return found


def doubled(batch: int, window: int) -> float:
    """Seconds of a verify of 2 batch over one of batch, 32 B on 4 H100."""
    table = Setting(target="Qwen2.5-32B", drafter="Qwen2.5-0.5B", engine=4, gpu="H100", rate=0.8, batch=batch)
    costs = table.candidates().verifiers[0].costs
    return costs.verify_s(2 * batch, 2 * batch * (1 + window)) / costs.verify_s(batch, batch * (1 + window))


def best(setting: Setting) -> float:
    """Return the gain of the best plan."""
    found = setting.candidates()
    return search(setting.cluster, found.verifiers, found.drafters, max_window=MAX_WINDOW)[0].speedup


def with_host(rows: Sequence[Setting], plain_ms: float, drafted_ms: float) -> str:
    """Say what it costs if rounds with drafts wait so much longer for the host than plain ones."""
    host_s = (0.0, (drafted_ms - plain_ms) / 1e3)
    shown = [s for s in rows if [f"{s.rate:g}", f"{s.batch}"] == TOLD and not s.step_ms]
    gains = [(s, best(s), best(replace(s, host_s=host_s))) for s in shown]
    return "; ".join(f"{s.target} on {s.gpu} {before:.2f}, {after:.2f}" for s, before, after in gains)


def inputs() -> str:
    peaks = "; ".join(
        f"{d.name}: {d.flops / 1e12:g} TFLOP/s bfloat16, {d.memory_bytes / 1e9:g} GB at "
        f"{d.memory_bytes_per_s / 1e12:g} TB/s, {d.link_bytes_per_s / 1e9:g} GB/s to its neighbours"
        for d in DEVICES.values()
        if d.name in ("H100", "H20")
    )
    of = device("H100")
    return (
        f"{peaks}. Attained: {of.matmul_share:.0%} of FLOP/s in matrix products, {of.weights_share:.0%} of bandwidth "
        f"reading weights, {of.attention_share:.0%} reading keys and values, {of.link_share:.0%} of the link; an "
        f"all-reduce takes {1e6 * of.all_reduce_s:g} us at least, a kernel {1e6 * of.kernel_s:g} us. Messages between "
        "drafters and verifiers take 100 us; sources: `specactor/planning/rooflines.py` "
        "and `model_shapes.py`."
    )


SHOWN = ("target on", "added to a draft step", "coupled", "decoupled", "gain of that", COLUMNS[-1])
TOLD = ["0.8", "64"]  # what the page shows: these columns, at this p and batch; the file has the rest


def verdict(rows: Sequence[Sequence[str]]) -> str:
    """Which kind of plan is chosen how often, and what Algorithm 1's would bring."""
    chosen = [row[COLUMNS.index("chosen")].partition(",")[0] for row in rows]
    counts = ", ".join(f"{kind} in {chosen.count(kind)}" for kind in ("coupled", "decoupled", "off"))
    gains = [float(row[COLUMNS.index("its gain")]) for row in rows]
    once = [float(row[COLUMNS.index("gain of that")]) for row in rows]
    own = [float(row[-1]) for row in rows]
    return (
        f"**Predicted, not measured.** Of {len(rows)} settings the best plan is {counts}; it is {min(gains):.2f} to "
        f"{max(gains):.2f} times as fast as plain decoding; {min(once):.2f} to {max(once):.2f} times if a verification "
        f"read a request's keys once and not per row. Algorithm 1's plan, in the same model, is slower than "
        f"that in {sum(a < b for a, b in zip(own, gains, strict=True))} ({min(own):.2f} to {max(own):.2f}) and slower "
        f"than plain decoding in {sum(gain < 1 for gain in own)}."
    )


def result(rows: Sequence[Setting]) -> Result:
    found = [row(setting) for setting in rows]
    measured = json.loads(MEASURED.read_text())
    plain_ms, drafted_ms = measured["1 x 0"], measured["1 x 1"]
    return Result(
        title="Plans at the scale of the SpecActor paper",
        verdict=verdict(found),
        intro=(
            f"{GPUS} GPUs, tensor parallelism 4 (32 B, dense) and 8 (235 B, 128 experts), "
            f"{CONTEXT} tokens of context on average, bfloat16. `batch`: requests per worker if all GPUs verify; where "
            "KV memory bounds it, how many fit. `p`: acceptance of every draft token; windows up to "
            f"{MAX_WINDOW}. `added to a draft step`: beside the roofline's seconds. Gains are tokens/s of the whole "
            "cluster, idle devices included, over plain decoding; in brackets the window, and verifiers:drafters x "
            "GPUs each. `Algorithm 1` is that of arXiv 2511.16193; the file also has its plans and its own "
            f"predictions. The page shows p 0.8 at batch 64.\n\nInputs. {inputs()}"
        ),
        columns=COLUMNS,
        rows=found,
        summary=(
            (*SHOWN[:-2], "best, keys once", "Algorithm 1, in our model"),
            [[of[COLUMNS.index(name)] for name in SHOWN] for of in found if of[1:3] == TOLD],
        ),
        source="Predicted from published figures; nothing was timed.",
        notes=NOTES.format(
            doubled=doubled(128, 4),
            context=CONTEXT,
            plain_ms=plain_ms,
            drafted_ms=drafted_ms,
            hosted=with_host(rows, plain_ms, drafted_ms),
        ),
    )


NOTES = """- What a verification reads decides. Its rows are decodes of one token, so w + 1 rows read a request's
  {context} tokens w + 1 times. If they were read once, the dense model would gain 2.50 at batch 64 and not 1.09. A
  GPU's cache may serve the further rows: only a measurement can say. An earlier page assumed that keys are read once.
- Speculation pays less the larger the batch; on H20 the dense model gains nothing from 64 on. The MoE gains most
  there: at 8, further tokens touch further experts.
- Where draft steps are as fast as the roofline, coupled drafting wins: a rejection costs a decoupled request a plain
  round, and drafters take devices from the verifiers. Decoupling wins where a draft step has fixed costs: at 2
  and 4 ms here, from 4 ms on with keys read once.
- The host's time is left out. On [one H100](gpu.md) a plain round of a tiny model took {plain_ms:.1f} ms and one with a
  draft token {drafted_ms:.1f}. If rounds with drafts took so much longer here, too, the best plans would gain, before
  and after: {hosted}.
- Algorithm 1 has no plain or coupled plan to fall back to, and its equal groups have too many drafters, or too few. By
  its own predictions it is ahead of coupled at 8 ms.

The paper's headline figures (2.0-2.4) are of whole rollouts; a row here is one batch. Its acceptance rates and context
lengths were not at hand. Verifying 256 requests takes 1.4 times as long as 128 there, and {doubled:.2f} times (32 B,
window 4) here."""


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args(arguments)
    publish("paper_plans", result(settings()))


if __name__ == "__main__":
    main()
