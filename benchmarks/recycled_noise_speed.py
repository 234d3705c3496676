"""How often the last response is right one epoch later, and what that is worth: one engine, policy and batch.

The responses of the policy of an epoch ago are told to the drafters; the policy of now samples with the same noise, or
with other noise. Drafters take turns; what is compared is processor time, since machines are shared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks.recycled_noise_runs import GROUP_SIZE, PER_STEP, RECIPES, WINDOW, one_epoch_on, start_of
from benchmarks.speculation_speed import processor_s
from benchmarks.trained_models import CACHE
from specactor.config import Config, EngineConfig, SpeculationConfig
from specactor.data.dataset import build_dataset
from specactor.data.stream import request_seed
from specactor.data.tokenizer import load_tokenizer
from specactor.rollout.requests import sampling_of
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.rollout.sglang.speculation_calls import CONFIGURE, REPORT
from specactor.rollout.speculation.counters import Counts
from specactor.rollout.speculation.drafter import Drafter, DraftSequence
from specactor.rollout.speculation.previous import PreviousDrafter
from specactor.rollout.speculation.suffix import SuffixDrafter
from specactor.types import RolloutRequest, Trajectory

TASK = "sums"
TEMPERATURES = (0.6, 1.5, 2.5)
RATES = (2e-5, 3e-4)
"""Learning rates of the epoch: of a run that learns slowly, and the quickstart's."""
TURNS = 7
ALONE = 6
"""Requests that run one after the other, as at the end of a rollout."""
TOLD, TOLD_FRESH = (CACHE / "recycled_noise" / name for name in ("told.json", "told-fresh.json"))
PLAIN, FRESH = "off", "suffix, fresh noise"
HERE = "benchmarks.recycled_noise_speed"
TEXT = SpeculationConfig(mode="coupled", drafters=(f"{HERE}:Told",), window=WINDOW, max_window=WINDOW)
WAYS = {
    PLAIN: replace(TEXT, mode="off"),
    "previous": TEXT,
    "suffix": replace(TEXT, drafters=(f"{HERE}:ToldSuffix",)),
    FRESH: replace(TEXT, drafters=(f"{HERE}:FreshSuffix",)),
}


class Told(PreviousDrafter):
    """Begins with the responses of an epoch ago."""

    def __init__(self) -> None:
        super().__init__()
        tell(self)


class ToldSuffix(SuffixDrafter):
    """Likewise."""

    def __init__(self) -> None:
        super().__init__()
        tell(self)


class FreshSuffix(SuffixDrafter):
    """Begins with responses of an epoch ago that had other noise."""

    def __init__(self) -> None:
        super().__init__()
        tell(self, TOLD_FRESH)


def tell(drafter: Drafter, file: Path = TOLD) -> None:
    for number, (prompt, seed, tokens) in enumerate(json.loads(file.read_text())):
        sequence = DraftSequence(request_id=f"told {number}", prompt_ids=tuple(prompt), seed=seed)
        drafter.open(sequence)
        sequence.output_ids.extend(tokens)
        drafter.commit(sequence, tokens)
        drafter.close(sequence)


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """After an epoch at one learning rate, at one temperature."""

    rate: float
    temperature: float
    entropy: float
    """Of a token, in nats."""
    right: float
    """Share of tokens that stood at their positions an epoch ago."""
    fresh: float
    """The same with fresh noise."""
    tokens_per_s: dict[str, dict[str, list[float]]]
    """Per second of processor time, by way, then together or alone, turn by turn."""
    accept_length: dict[str, dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Work:
    together: list[RolloutRequest]
    alone: list[RolloutRequest]

    @classmethod
    def of(cls, config: Config, model: Path, temperature: float, *, noise: int = 0) -> Work:
        """A step of the run's own problems; the first responses of some of them are alone."""
        problems = build_dataset(config.data.train_source, load_tokenizer(model), max_prompt_tokens=64)[:PER_STEP]
        sampling = replace(sampling_of(config.rollout), temperature=temperature)
        requests = [
            RolloutRequest(
                request_id=f"{problem.index}.{sample}",
                prompt_ids=problem.prompt_ids,
                sampling=sampling,
                seed=request_seed(0, noise, problem.index, sample),
                group_id=problem.index,
            )
            for problem in problems
            for sample in range(GROUP_SIZE)
        ]
        return cls(together=requests, alone=requests[:: GROUP_SIZE + 1][:ALONE])


def spec(model: Path, folder: Path) -> EngineSpec:
    return EngineSpec(
        index=0,
        model_dir=str(model),
        dtype="float32",
        devices=(0,),
        config=EngineConfig(max_running_requests=PER_STEP * GROUP_SIZE, max_total_tokens=16_384),
        speculation=TEXT,
        context_length=256,
        log_file=str(folder / "engine.log"),
    )


def files_of(base: Path) -> dict[tuple[float, float], Path]:
    """By learning rate and temperature."""
    return {(rate, t): base / "speed" / f"{rate}-{t}.json" for rate in RATES for t in TEMPERATURES}


def measured(base: Path) -> list[Found]:
    """What was measured so far."""
    return [msgspec.json.decode(f.read_bytes(), type=Found) for f in files_of(base).values() if f.exists()]


def measure(base: Path) -> None:
    """Measure what is missing; each learning rate and temperature is kept in a file."""
    config, folder, files = RECIPES[TASK](), base / "speed", files_of(base)
    folder.mkdir(parents=True, exist_ok=True)
    start = start_of(TASK, base)
    missing = [key for key, file in files.items() if not file.exists()]
    if missing:
        TOLD.write_text("[]")
        temperatures = dict.fromkeys(t for _, t in missing)
        with running(spec(start, folder)) as engine:
            before = {t: engine.generate(Work.of(config, start, t).together) for t in temperatures}
            fresh = {t: engine.generate(Work.of(config, start, t, noise=1).together) for t in temperatures}
        for rate in dict.fromkeys(rate for rate, _ in missing):
            now = one_epoch_on(TASK, base, rate)
            with running(spec(now, folder)) as engine:
                for t in [t for other, t in missing if other == rate]:
                    found = at(engine, Work.of(config, now, t), before[t], fresh[t], t, rate)
                    files[rate, t].write_bytes(msgspec.json.encode(found))


def at(
    engine: Engine,
    work: Work,
    before: Sequence[Trajectory],
    fresh: Sequence[Trajectory],
    temperature: float,
    rate: float,
) -> Found:
    """Args: responses of an epoch ago, with the same noise and with other noise."""
    for file, responses in ((TOLD, before), (TOLD_FRESH, fresh)):
        told = [(r.prompt_ids, r.seed, list(t.token_ids)) for r, t in zip(work.together, responses, strict=True)]
        file.write_text(json.dumps(told))
    speed: dict[str, dict[str, list[float]]] = {way: {"together": [], "alone": []} for way in WAYS}
    length: dict[str, dict[str, float]] = {way: {} for way in WAYS}
    texts: list[list[tuple[int, ...]]] = []
    now: list[Trajectory] = []
    for turn in range(TURNS + 1):  # the first one is not counted
        for way, speculation in WAYS.items():
            for place, calls in (("together", [work.together]), ("alone", [[r] for r in work.alone])):
                engine.flush()
                engine.rank_call(CONFIGURE, msgspec.json.encode(speculation), timeout_s=60)
                began_s = processor_s(engine)
                done = [engine.generate(call) for call in calls]
                seconds = processor_s(engine) - began_s
                tokens = sum(len(t.token_ids) for of_call in done for t in of_call)
                counts = msgspec.json.decode(engine.rank_call(REPORT, b"", timeout_s=60)[0], type=dict[str, Counts])
                if turn:
                    speed[way][place].append(tokens / seconds)
                    drafted = [c for name, c in counts.items() if name != PLAIN]
                    length[way][place] = sum(c.emitted for c in drafted) / max(1, sum(c.verifies for c in drafted))
                if place == "together":
                    now = done[0]
                    texts.append([tuple(t.token_ids) for t in now])
    assert all(text == texts[0] for text in texts), "what is drafted changes no token"
    print(f"rate {rate}, temperature {temperature}: measured", flush=True)
    return Found(
        rate=rate,
        temperature=temperature,
        entropy=-fmean(p for t in now for p in t.logprobs),
        right=right(now, before),
        fresh=right(now, fresh),
        tokens_per_s=speed,
        accept_length=length,
    )


def right(now: Sequence[Trajectory], before: Sequence[Trajectory]) -> float:
    """Share of the tokens of now that are those of before at their positions."""
    equal = [
        a == b
        for one, other in zip(now, before, strict=True)
        for a, b in zip_longest(one.token_ids, other.token_ids[: len(one.token_ids)])
    ]
    return fmean(equal)
