"""What a run logged, as distributions to simulate from. PURE: its metrics in, lengths, acceptance and seconds out.

Lengths are log-normals with each step's mean and 95th percentile, mixed; acceptance by position is the ratio of
`accepted_at_J` to `drafted_at_J` of all steps. Both are cut off by what the run did: no position beyond its windows,
no length beyond its limit.

Invariant: nothing is made up: a metric that is missing is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median

import numpy as np

from specactor.errors import DataError
from specactor.simulator.requests import Lengths, Method

PER_STEP = 256
"""Lengths that are drawn of each step's distribution."""
Line = Mapping[str, float | int | str]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Of one run."""

    lengths: Lengths
    methods: Mapping[str, Method]
    """By drafter, those that drafted."""
    responses: int
    """Per step, in the middle."""
    train_tokens_per_s: float
    """Of the whole job; 0: not logged."""
    sync_s: float
    """0: not logged."""


def of_metrics(lines: Iterable[Line], *, max_window: int, seed: int = 0) -> Replay:
    """`lines` of metrics.jsonl. Raises DataError where lengths are missing."""
    steps = [line for line in lines if "response/length_mean" in line]
    if not steps:
        raise DataError("replay: got metrics without response/length_mean, expected those of a run with RL steps.")
    return Replay(
        lengths=_lengths(steps, np.random.default_rng(seed)),
        methods=_methods(steps, max_window),
        responses=round(_median(steps, "rollout/responses")),
        train_tokens_per_s=_median(steps, "train/tokens_per_s"),
        sync_s=_median(steps, "time/sync_s"),
    )


def _lengths(steps: Sequence[Line], rng: np.random.Generator) -> Lengths:
    observed: list[int] = []
    longest = max(int(line["response/length_max"]) for line in steps)
    for line in steps:
        mean, p95, most = (float(line[f"response/length_{key}"]) for key in ("mean", "p95", "max"))
        of = Lengths.of_statistics(mean=max(mean, 1.0), p95=max(min(p95, most), 1.0), longest=max(int(most), 1))
        observed += of.draw(rng, np.arange(PER_STEP)).tolist()
    return Lengths(observed=tuple(observed), longest=max(longest, 1))


def _methods(steps: Sequence[Line], max_window: int) -> dict[str, Method]:
    names = sorted({key.split("/")[1] for line in steps for key in line if "/drafted_at_" in key})
    methods = {}
    for name in names:
        drafted, accepted = (
            [_sum(steps, f"speculation/{name}/{what}_at_{j}") for j in range(1, max_window + 1)]
            for what in ("drafted", "accepted")
        )
        tried = [drafted[0], *(min(d, a) for d, a in zip(drafted[1:], accepted[:-1], strict=True))]
        rates = tuple(min(1.0, a / t) for a, t in zip(accepted, tried, strict=True) if t > 0)
        if rates:
            methods[name] = Method(rate=rates[0], by_position=rates)
    return methods


def _sum(steps: Sequence[Line], key: str) -> float:
    return sum(float(line[key]) for line in steps if key in line)


def _median(steps: Sequence[Line], key: str) -> float:
    """0 where it was never logged."""
    values = [float(line[key]) for line in steps if key in line and isfinite(float(line[key]))]
    return median(values) if values else 0.0
