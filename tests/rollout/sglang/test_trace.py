"""What an engine and a drafter process did when, and what they say of themselves; mode auto drafts where it pays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from specactor.config import SpeculationConfig
from specactor.rollout.decoupled.transport import Address, DrafterAccess, make_keys
from specactor.rollout.drafter_pool import DrafterPool
from specactor.rollout.sglang.engine_client import Engine, EngineSpec, running
from specactor.rollout.speculation.costs import CostTable
from specactor.rollout.speculation.counters import Counts
from specactor.trace import Span, chrome_trace
from specactor.waits import SILENT_S
from tests.rollout.conftest import request
from tests.rollout.sglang.asking import in_background
from tests.rollout.sglang.decoupled_setting import OFF, assert_holds_nothing, decoupled, recital_folder, recital_spec
from tests.rollout.sglang.recital import behave, write
from tests.rollout.sglang.test_verify_worker import configure, facts

BATCH = [request(i, new=90 + i % 23) for i in range(8)]
ENGINE_KEYS, DRAFTER_KEYS = make_keys()


@dataclass(frozen=True)
class Setting:
    engine: Engine
    drafters: DrafterPool
    folder: Path
    """Of the recital, of what `BATCH` emits."""
    want: list[tuple[object, ...]]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory, make_spec: Callable[..., EngineSpec]) -> Iterator[Setting]:
    folder = recital_folder(tmp_path_factory.mktemp("recital"))
    drafter = recital_spec(folder, keys=DRAFTER_KEYS)
    access = DrafterAccess(drafters=(Address(endpoint=drafter.endpoint, keys=ENGINE_KEYS),), engine="engine")
    spec = make_spec(80, speculation=decoupled(4), drafters=access)
    with DrafterPool([drafter]) as drafters, running(spec) as engine:
        drafters.wait_ready()
        configure(engine, OFF)
        engine.flush()
        plain = engine.generate(BATCH)
        write(folder, BATCH, plain)
        behave(folder, "right")
        yield Setting(engine, drafters, folder, facts(plain))


def rollouts(
    setting: Setting,
    config: SpeculationConfig,
    count: int = 3,
    done: Callable[[dict[str, Counts]], bool] = lambda counts: True,
) -> dict[str, Counts]:
    """Counts of the last one; earlier ones may end before the drafter has answered. Args: how many at least, and when
    it is over, after 20 in any case."""
    configure(setting.engine, config)
    for number in range(1, 21):
        setting.engine.speculation_counts()
        setting.engine.flush()
        assert facts(setting.engine.generate(BATCH)) == setting.want
        counts = setting.engine.speculation_counts()
        if number >= count and done(counts):
            break
    return counts


def table(folder: Path, row_s: float) -> str:
    """Costs of rounds: a step of 10 ms, and every row."""
    points = [(n, n * k, 0.01 + n * k * row_s) for n in (1, 4, 8) for k in (1, 2, 4, 9)]
    file = folder / "costs.json"
    file.write_text(CostTable.fit(points).to_json())
    return str(file)


@pytest.mark.parametrize(("row_s", "pays"), [(1e-6, True), (1e-2, False)])
def test_auto_drafts_where_costs_say_that_it_pays(setting: Setting, tmp_path: Path, row_s: float, pays: bool) -> None:
    config = SpeculationConfig(
        mode="auto",
        drafters=("decoupled",),
        max_window=8,
        draft_model="with the drafters",
        cost_table=table(tmp_path, row_s),
    )
    setting.engine.trace(on=True)

    def as_told(counts: dict[str, Counts]) -> bool:
        """A busy machine may take longer to see it."""
        return not pays or (counts["decoupled"].accepted > 200 and counts["off"].rested <= 40)

    counts = rollouts(setting, config, done=as_told)
    switches = [span for span in setting.engine.trace(on=False) if span.name == "switch to decoupled"]
    assert bool(switches) == pays
    assert all(span.details["why"] for span in switches)
    assert (counts["decoupled"].accepted > 200) == pays
    assert (counts["off"].rested > 40) == (not pays)


def shared_rounds(setting: Setting) -> float:
    """Check one traced rollout; return the share of its verifications in which the drafter worked."""
    engine, drafters = setting.engine, setting.drafters
    engine.trace(on=True)
    drafters.work(trace=True)
    by_name = rollouts(setting, decoupled(4), 1)
    counts = by_name["decoupled"]
    spans = engine.trace(on=False)
    work = drafters.work()["drafter 0"]
    verifies = [span for span in spans if span.name == "verify"]
    plain = sum(int(span.details["rounds"]) for span in spans if span.name == "plain")
    assert len(verifies) + plain == sum(each.rounds for each in by_name.values())
    assert sum(int(span.details["rows"]) - int(span.details["requests"]) for span in verifies) == counts.drafted
    assert not overlaps([span for span in spans if span.name in ("draft", "verify", "emit", "plain")])
    drafts = [span for span in work.spans if span.name == "draft"]
    assert sum(span.end_s - span.start_s for span in drafts) == pytest.approx(work.busy_s)
    assert not overlaps([span for span in work.spans if span.name in ("draft", "idle")])
    both = sum(any(d.start_s < v.end_s and v.start_s < d.end_s for d in drafts) for v in verifies)
    assert chrome_trace({"engine 0": spans, "drafter 0": work.spans}).count(b'"verify"') == len(verifies)
    return both / len(verifies)


def test_a_trace_shows_that_drafter_and_verifier_work_at_the_same_time(setting: Setting) -> None:
    engine, drafters = setting.engine, setting.drafters
    behave(setting.folder, "slow")
    rollouts(setting, decoupled(4))
    assert engine.trace(on=True) == [], "it was off"
    assert drafters.work(trace=True)["drafter 0"].spans == []
    # On a busy machine they may have had one core.
    assert any(shared_rounds(setting) > 1 / 3 for _ in range(10))
    assert engine.trace(on=False) == []
    assert drafters.work()["drafter 0"].spans == []


def overlaps(spans: Sequence[Span]) -> bool:
    ordered = sorted(spans, key=lambda span: span.start_s)
    return any(after.start_s < before.end_s for before, after in pairwise(ordered))


def test_drafters_tell_what_they_drafted_and_what_was_lost(setting: Setting) -> None:
    behave(setting.folder, "half")
    configure(setting.engine, decoupled(4))
    setting.drafters.work(trace=True)
    told: dict[str, float] = {}
    for number in range(1, 21):  # on a busy machine drafts may come late
        setting.engine.flush()
        assert facts(setting.engine.generate(BATCH)) == setting.want
        for name, value in setting.engine.speculation_counts()["decoupled"].figures.items():
            told[name] = told.get(name, 0.0) + value
        if number >= 3 and told["drafted_ahead"] > told["wasted_ahead"] > 0 and told["stale_tails"]:
            break
    assert 1 <= told["live_drafters"] <= number
    assert told["drafted_ahead"] > told["wasted_ahead"] > 0
    assert told["stale_tails"] > 0
    assert told["dropped_frames"] == 0
    work = setting.drafters.work()["drafter 0"]
    assert work.busy_s > 0
    assert work.drops == {}
    drafted, lost = (
        sum(int(span.details["tokens"]) for span in work.spans if span.name == name) for name in ("draft", "rollback")
    )
    assert 0 < lost <= drafted
    assert told["drafted_ahead"] <= drafted, "it tells with its beats"


def test_a_speculator_that_is_replaced_takes_leave_of_its_drafters(setting: Setting) -> None:
    """Else they would draft on for its requests, until its engine was silent for long."""
    behave(setting.folder, "slow")
    configure(setting.engine, decoupled(4))
    setting.engine.flush()
    thread, answers = in_background(setting.engine, BATCH)
    time.sleep(0.3)
    configure(setting.engine, OFF)
    started_s = time.monotonic()
    assert_holds_nothing(setting.drafters.drafters[0].spec.endpoint, ENGINE_KEYS)
    assert time.monotonic() - started_s < SILENT_S / 2
    thread.join()
    assert facts(answers) == setting.want
