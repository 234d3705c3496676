"""What rounds cost is found on a machine that is slow now and then, where a single pass errs much."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from benchmarks import decoupled_speed_profile as module
from benchmarks.decoupled_speed_bench import NEW_TOKENS
from benchmarks.decoupled_speed_profile import _coupled, _Pace, _works, median_beside
from specactor.config import SpeculationConfig
from specactor.rollout.sglang.speculation_calls import Rounds
from specactor.rollout.speculation.costs import CostTable
from specactor.types import RolloutRequest, SamplingParams

PLAIN_S, VERIFY_S, CHOOSING_S = 0.004, 0.005, 0.0005
SLOW, SLOW_S, FAST_S = 1.8, 0.3, 1.2
"""Times as long in slow stretches; mean lengths of these and of the others."""
SIZES = (1, 2)


@dataclass
class FakeBench:
    """Engines whose rounds take these seconds, on a machine with slow stretches."""

    folder: Path
    seed: int
    engines: tuple[str, str] = ("one", "two")
    requests: dict[int, list[RolloutRequest]] = field(default_factory=dict)
    expected: dict[str, tuple[int, ...]] = field(default_factory=dict)
    config: SpeculationConfig = field(default_factory=SpeculationConfig)
    found: Rounds = field(default_factory=lambda: Rounds(plain=[], verifies=[], drafts={}))
    left_s: float = FAST_S
    slow: bool = False

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        sampling = SamplingParams(temperature=1.0, max_new_tokens=NEW_TOKENS)
        for n in SIZES:
            self.requests[n] = [
                RolloutRequest(request_id=f"{n}.{i}", prompt_ids=(1,), sampling=sampling, seed=100 * n + i, group_id=i)
                for i in range(n)
            ]

    def took(self, seconds: float) -> float:
        pace = SLOW if self.slow else 1.0
        self.left_s -= pace * seconds
        if self.left_s < 0:
            self.slow = not self.slow
            self.left_s = self.rng.expovariate(1 / (SLOW_S if self.slow else FAST_S))
        return pace * seconds

    def configure(self, config: SpeculationConfig, engines: Sequence[str]) -> None:
        self.config, self.found = config, Rounds(plain=[], verifies=[], drafts={})

    def decode(self, requests: Sequence[RolloutRequest], engines: Sequence[str]) -> None:
        self.expected |= {r.request_id: (1,) * NEW_TOKENS for r in requests}
        n, drafter = len(requests) // len(engines), "model" if "model" in self.config.drafters else "dialled"
        window = 4 if self.config.window is None else self.config.window
        for _ in range(NEW_TOKENS - 1 if window == 0 else NEW_TOKENS // 3):
            if window == 0:
                self.found.plain.append((n, n, self.took(PLAIN_S)))
                continue
            draft_s = self.took(CHOOSING_S)
            self.found.drafts.setdefault(drafter, []).append((n, n * window, draft_s))
            self.found.verifies.append((n, n * (1 + window), self.took(VERIFY_S)))

    def rounds(self) -> Rounds:
        return self.found


def errors(folder: Path, passes: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Of what choosing windows costs one request, of several runs, as shares of a plain step."""
    monkeypatch.setattr(module, "PASSES", passes)
    found = []
    for seed in range(16):
        bench = FakeBench(folder, seed)
        pace = _Pace(bench, _works(bench))  # type: ignore[arg-type]
        timed, _ = _coupled(bench, pace, lambda text: None)  # type: ignore[arg-type]
        plain = [(n, n, s) for n, s in pace.plain_s.items()]
        table = CostTable.fit([p for one in timed for p in one.verifies], plain=plain, drafters={})
        found.append(abs(median_beside(timed, table).at(1, 1.0) - CHOOSING_S) / PLAIN_S)
    return sorted(found)


def test_slow_stretches_are_outvoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    several, single = errors(tmp_path, module.PASSES, monkeypatch), errors(tmp_path, 1, monkeypatch)
    assert several[-1] < 0.2 < single[-3], "one of five runs is worse"
