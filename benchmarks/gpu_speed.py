"""The stage `speed` of `benchmarks.gpu`: tokens/s of ways to speculate, in turns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks import dialled
from specactor.config import SpeculationConfig
from specactor.rollout.sglang.engine_client import Engine
from specactor.types import RolloutRequest

if TYPE_CHECKING:
    from benchmarks.gpu import Bench

REPETITIONS = 3
RIGHT = 0.8
"""Of the dialled drafter."""


def as_in_training(requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
    """Return the requests sampled at temperature 1, from all tokens."""
    return [replace(r, sampling=replace(r.sampling, temperature=1.0, top_p=1.0, top_k=-1)) for r in requests]


def speed(bench: Bench) -> dict[str, Any]:
    """Return tokens/s by requests and window (0: plain), in turns, with drafts that are right at RIGHT, and how many
    tokens and log-probabilities differ from plain ones."""
    size = bench.size
    off = SpeculationConfig(mode="off", max_window=max(size.windows))
    ways = {"0": off} | dialled_ways(size.windows, "{}")
    requests = as_in_training(bench.requests(max(size.batches)))
    return in_turns(bench, bench.speculating, ways, {str(n): requests[:n] for n in size.batches})


def dialled_ways(windows: Sequence[int], name: str, drafter: str = dialled.IN_ENGINE) -> dict[str, SpeculationConfig]:
    """Return ways to speculate with the dialled drafter, by name."""
    speculating = SpeculationConfig(mode="coupled", drafters=(drafter,), max_window=max(windows))
    return {name.format(window): replace(speculating, window=window) for window in windows if window > 1}


def in_turns(
    bench: Bench,
    engine: Engine,
    ways: Mapping[str, SpeculationConfig],
    cases: Mapping[str, Sequence[RolloutRequest]],
    *,
    repetitions: int = REPETITIONS,
    keep_prompts: bool = False,
) -> dict[str, Any]:
    """Return tokens/s by case and way, and how many tokens and log-probabilities differ from those of the first way.
    The requests of a case are the first ones of a larger case's."""
    from benchmarks import gpu  # which imports this module

    plain_way = next(iter(ways.values()))
    largest = max(cases.values(), key=len)
    gpu.configure(engine, plain_way)
    engine.flush()
    plain = engine.generate(largest)
    outputs = {str(r.seed): list(t.token_ids) for r, t in zip(largest, plain, strict=True)}
    script = dialled.Script(acceptance=RIGHT, step_s=[0.0], outputs=outputs)
    (bench.folder / "script.json").write_bytes(msgspec.json.encode(script))
    found: dict[str, Any] = {"differ": 0, "rates": {}}
    for case, requests in cases.items():
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for repetition in range(repetitions + 1):
            for way, config in ways.items():
                gpu.configure(engine, config)
                if not keep_prompts:
                    engine.flush()
                start = time.perf_counter()
                got = engine.generate(requests)
                if repetition:  # the first warms up
                    rates[way].append(sum(len(t.token_ids) for t in got) / (time.perf_counter() - start))
                assert len(got) == len(requests)
                one = gpu.differences(got, plain)
                found["differ"] += one["differ"] + one["bits"]
        found["rates"][case] = rates
        print(f"{case}: {told({case: rates}, next(iter(ways)))}; {found['differ']} differ", flush=True)
    return found


def told(rates: Mapping[str, Mapping[str, Sequence[float]]], plain: str) -> str:
    """Return the stage's line of the table."""
    medians = {count: {way: median(of) for way, of in ways.items()} for count, ways in rates.items()}
    return "; ".join(
        f"{count} requests: {ways[plain]:.0f} tokens/s, "
        + ", ".join(f"{way} {rate / ways[plain]:.2f}" for way, rate in ways.items() if way != plain)
        for count, ways in medians.items()
    )
