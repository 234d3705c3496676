"""Where the machine's pace changes, ratios and profiled seconds stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from benchmarks import decoupled_speed_turns as module
from benchmarks.decoupled_speed_bench import NEW_TOKENS, Way
from benchmarks.decoupled_speed_profile import _Pace
from benchmarks.decoupled_speed_turns import DRAFTING, Turns, as_dialled, pace_at, pace_of
from benchmarks.dialled import Script
from specactor.config import SpeculationConfig
from specactor.rollout.sglang.speculation_calls import Rounds
from specactor.rollout.speculation.costs import CostTable
from specactor.types import RolloutRequest, SamplingParams

PREFILL_S = 0.25
GAIN = 1.6
"""Of all that drafts over what does not."""


def request(number: int) -> RolloutRequest:
    sampling = SamplingParams(temperature=1.0, max_new_tokens=NEW_TOKENS)
    return RolloutRequest(request_id=str(number), prompt_ids=(1,), sampling=sampling, seed=number, group_id=0)


@dataclass
class FakeBench:
    """Engines that take PREFILL_S and a second, times `pace` of the decodings so far; a mode that drafts is faster."""

    pace: Callable[[int], float]
    mode: str = ""
    decodings: int = 0
    engines: tuple[str, str] = ("one", "two")
    requests: dict[int, list[RolloutRequest]] = field(default_factory=dict)
    expected: dict[str, tuple[int, ...]] = field(default_factory=dict)
    plain: list[tuple[float, float, float]] = field(default_factory=list)

    def of(self, mode: str) -> Sequence[str]:
        return self.engines

    def configure(self, config: SpeculationConfig, engines: Sequence[str]) -> None:
        self.mode = config.mode

    def decode(self, requests: Sequence[RolloutRequest], engines: Sequence[str]) -> float:
        if requests[0].sampling.max_new_tokens == 1:
            return PREFILL_S
        pace = self.pace(self.decodings)
        self.decodings += 1
        size = len(requests) // len(engines)
        self.plain = [(size, size, 0.01 * size * pace)] * 9
        return PREFILL_S + pace / (1.0 if self.mode == "off" else GAIN)

    def rounds(self) -> Rounds:
        return Rounds(plain=self.plain, verifies=[], drafts={})


def turns(bench: FakeBench, num_groups: int = 1) -> Turns:
    groups = [[request(n)] for n in range(num_groups)]
    found = Turns(bench, Way(name="w", in_engine="suffix", continuer="x", model_dir="y"), groups)  # type: ignore[arg-type]
    for mode in DRAFTING:
        found.begin(mode)
        found.teach(mode)
        found.timed(mode)
        found.off()
    return found


@pytest.mark.parametrize("num_groups", [1, 4])
def test_a_steady_drift_changes_no_ratio(num_groups: int) -> None:
    found = turns(FakeBench(pace=lambda n: 1.0 + 0.1 * n), num_groups)
    assert found.ratios() == {mode: [pytest.approx(GAIN)] for mode in DRAFTING}
    first_s = sum(1.0 + 0.1 * n for n in range(num_groups))
    assert found.off_s()[0] == pytest.approx(first_s), "less the prefills"
    assert len(found.off_s()) == 1 + len(DRAFTING)


def test_a_comparison_with_what_was_decoded_first_is_caught() -> None:
    """A seeded mistake: what was decoded first is what all are compared with."""
    found = turns(FakeBench(pace=lambda n: 1.0 + 0.1 * n))
    found._off_s = found._off_s[:1] * len(found._off_s)
    assert all(ratio != pytest.approx(GAIN, rel=0.05) for [ratio] in found.ratios().values())


def test_profiled_seconds_are_at_the_pace_of_the_first_plain_steps() -> None:
    work = {size: [request(n) for n in range(size)] for size in (1, 2)}
    slow = {"now": 1.0}
    bench = FakeBench(pace=lambda n: slow["now"])
    pace = _Pace(bench, work)  # type: ignore[arg-type]
    assert pace.plain_s == {1: pytest.approx(0.01), 2: pytest.approx(0.02)}
    assert pace.share(2) == pytest.approx(1.0)
    slow["now"] = 2.0
    assert pace.share(2) == pytest.approx(1 / 1.5), "half of it was at the old pace"
    assert pace.share(2) == pytest.approx(0.5)
    slow["now"] = 4.0
    pace.begin(1)
    assert pace.share(1) == pytest.approx(0.25)


def test_a_dialled_drafter_counts_with_the_share_that_it_took(tmp_path: Path) -> None:
    points = [(n, n * w, 1e-3 * n * w) for n in (1, 2, 4, 8) for w in (1, 2)]
    table = CostTable.fit(points, plain=[(n, n, 0.01) for n in (1, 2, 4, 8)], drafters={})
    bench = FakeBench(pace=lambda n: 2 * (NEW_TOKENS - 1) * 0.01, requests={4: [request(n) for n in range(4)]})
    assert pace_of(bench, table, 4) == pytest.approx(2.0)  # type: ignore[arg-type]
    path = tmp_path / "script.json"
    script = Script(acceptance=0.5, step_s=[0.3 * 2.0 * 0.01] * 4, outputs={})
    path.write_bytes(msgspec.json.encode(script))
    way = Way(name="d", in_engine="x", continuer="y", model_dir=str(path), acceptance=0.5, share=0.3)
    assert pace_at(table, 4, 4 / 0.03) == pytest.approx(3.0)
    assert as_dialled(way, table, 4, 4 / 0.02).share == pytest.approx(0.3)
    assert as_dialled(way, table, 4, 4 / 0.03).share == pytest.approx(0.2), "plain steps became slower, its own did not"
    trained = Way(name="t", in_engine="model", continuer="model", model_dir="z")
    assert as_dialled(trained, table, 4, 100.0) is trained
    assert module.PACES > 1
