"""Profiling: the right seconds in the right cells, bounded time; a real engine gives a table that speculation reads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
from rich.console import Console

from specactor.config import Config, EngineConfig, RolloutConfig, SpeculationConfig
from specactor.errors import ConfigError, PlanError
from specactor.planning import profile_command as profiling
from specactor.planning.profile_command import FILLER, PASSES, ROUNDS_PER_PASS, Sizes, measure, measure_process
from specactor.planning.profile_grid import Cell, cells, cost_table
from specactor.recipes import load
from specactor.rollout.decoupled.spec import Work
from specactor.rollout.sglang.speculation_calls import CONFIGURE, ROUNDS, Rounds
from specactor.rollout.speculation.costs import CostTable
from specactor.rollout.speculation.speculator import Speculator
from specactor.rollout.warm_starter import NAME as STARTER
from specactor.types import RolloutRequest
from tests.rollout.conftest import heed_interrupts, process_exists
from tests.rollout.sglang.test_model_drafter import make_dense

CONFIG = RolloutConfig(
    prompts_per_step=3,
    group_size=4,
    engine=EngineConfig(max_running_requests=10, max_total_tokens=4096),
    speculation=SpeculationConfig(drafters=("suffix", "second"), max_window=4),
)
SIZES = Sizes.of(CONFIG, vocab=50, context=158)


class FakeEngine:
    """Rounds take `slower` times what `verify_s` and `draft_s` say, the first of a call `first` times as long; drafts
    are always wrong. `clock` goes on with them."""

    def __init__(self, *, slower: float = 1.0, first: float = 100.0) -> None:
        self.now, self._slower, self._first = 0.0, slower, first
        self.asked: list[RolloutRequest] = []
        self.sizes: list[int] = []
        """Of the calls."""

    def clock(self) -> float:
        return self.now

    @staticmethod
    def verify_s(requests: int, rows: int) -> float:
        return 1e-3 + 1e-4 * requests + 5e-5 * rows

    @staticmethod
    def draft_s(drafter: str, requests: int, window: int) -> float:
        return {"suffix": 1e-5, "second": 2e-5, FILLER: 1.0, "decoupled": 3e-5}[drafter] * requests * window

    def rank_call(self, name: str, payload: bytes, *, timeout_s: float) -> list[bytes]:
        if name == ROUNDS:
            return [msgspec.json.encode(self._rounds)]
        assert name == CONFIGURE
        self._config = msgspec.json.decode(payload, type=SpeculationConfig)
        self._rounds = Rounds(plain=[], verifies=[], drafts={})
        return [b""]

    def generate(self, requests: list[RolloutRequest]) -> None:
        self.asked += requests
        self.sizes.append(len(requests))
        [drafter], count = self._config.drafters, len(requests)
        assert self._config.window is not None
        new = requests[0].sampling.max_new_tokens
        for left in range(new - 1, 0, -1):
            window = min(self._config.window, left - 1)
            times = self._slower * (self._first if left == new - 1 else 1)
            verify_s = times * self.verify_s(count, count * (1 + window))
            of = self._rounds.verifies if self._config.window else self._rounds.plain
            of.append((count, count * (1 + window), verify_s))
            draft_s = times * self.draft_s(drafter, count, window)
            if window:
                self._rounds.drafts.setdefault(drafter, []).append((count, count * window, draft_s))
            self.now += verify_s + draft_s


def measured_by(engine: FakeEngine, limit_s: float = 1e9) -> dict[Cell, list[float]]:
    found = cells(max_requests=10, max_window=4, drafters=CONFIG.speculation.drafters)
    return measure(engine, CONFIG, found, SIZES, limit_s=limit_s, clock=engine.clock)  # type: ignore[arg-type]


def test_every_cell_has_the_seconds_of_its_own_rounds() -> None:
    engine = FakeEngine()
    measured = measured_by(engine)
    for cell, seconds in measured.items():
        expected = (
            engine.draft_s(cell.drafter, cell.requests, cell.window)
            if cell.drafter
            else engine.verify_s(cell.requests, cell.requests * (1 + cell.window))
        )
        rounds = 2 + 2 * cell.window if cell.drafter else ROUNDS_PER_PASS
        assert len(seconds) == PASSES * (rounds - 1)
        assert seconds == pytest.approx([expected] * len(seconds))
    between = Cell(requests=3, window=3)
    table = cost_table(measured, model="", device="", date="")
    assert between.predicted_s(table) == pytest.approx(engine.verify_s(3, 12))  # all of it is linear


def test_requests_are_those_of_the_recipe_and_fit() -> None:
    engine = FakeEngine()
    measured_by(engine)
    assert {len(r.prompt_ids) for r in engine.asked} == {SIZES.prompt}
    assert max(r.sampling.max_new_tokens for r in engine.asked) == SIZES.response
    assert all(0 <= token < 50 for r in engine.asked for token in r.prompt_ids)
    assert len({r.prompt_ids for r in engine.asked}) == 3  # groups share a prompt
    assert SIZES.prompt + SIZES.response <= 158
    assert SIZES.most_requests(CONFIG, 100_000) == 10
    assert SIZES.most_requests(replace(CONFIG, prompts_per_step=2), 100_000) == 8
    assert SIZES.most_requests(CONFIG, 5 * (SIZES.prompt + SIZES.response + 2 * 5)) == 5


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanError, match="max_total_tokens"):
        SIZES.most_requests(CONFIG, SIZES.prompt)
    with pytest.raises(PlanError, match="context of 12 tokens"):
        Sizes.of(CONFIG, vocab=50, context=12)


def test_measuring_ends_in_time_with_the_passes_that_are_whole() -> None:
    whole = FakeEngine()
    rounds = {cell: len(seconds) // PASSES for cell, seconds in measured_by(whole).items()}
    late = FakeEngine()
    measured = measured_by(late, limit_s=0.5 * whole.now)
    assert {cell: len(seconds) for cell, seconds in measured.items()} == rounds
    assert late.now < 0.6 * whole.now
    with pytest.raises(PlanError, match=r"no pass over all .* Allow more with --limit"):
        measured_by(FakeEngine(), limit_s=0.2 * whole.now)


def test_a_process_is_measured_at_the_pace_of_the_table() -> None:
    """The machine is half as fast as when the table was measured."""
    table = cost_table(measured_by(FakeEngine()), model="", device="", date="")
    engine = FakeEngine(slower=2.0, first=2.0)
    engine.ready = SimpleNamespace(kv_tokens=4096)  # type: ignore[attr-defined]

    def work(*, trace: bool) -> Work:
        turns = [(size, size, 0.004) for size in engine.sizes[-1:]]
        return Work(busy_s=0.0, turns=10 * turns, spans=[])

    process = SimpleNamespace(work=work, spec=SimpleNamespace(index=3))
    config = replace(CONFIG, speculation=replace(CONFIG.speculation, draft_model="there"))
    costs = measure_process(engine, process, config, table, SIZES, limit_s=1e9, clock=engine.clock)  # type: ignore[arg-type]
    assert costs.token_s.requests == costs.ahead_s.requests == (1, 2, 4, 8, 10)
    assert [s for [s] in costs.token_s.seconds] == pytest.approx([0.002] * 5)
    at_most = [engine.draft_s("decoupled", n, 4) for n in (1, 2, 4, 8, 10)]
    assert all(0.5 * most < s <= 1.5 * most for [s], most in zip(costs.ahead_s.seconds, at_most, strict=True))


def test_a_process_that_drafts_nothing_is_an_error() -> None:
    engine, measured = FakeEngine(), measured_by(FakeEngine())
    engine.ready = SimpleNamespace(kv_tokens=4096)  # type: ignore[attr-defined]
    process = SimpleNamespace(work=lambda trace: None, spec=SimpleNamespace(index=3))
    table = cost_table(measured, model="", device="", date="")
    config = replace(CONFIG, speculation=replace(CONFIG.speculation, draft_model="there"))
    with pytest.raises(PlanError, match=r"drafter 3 drafted 0 times .* allow more with --limit"):
        measure_process(engine, process, config, table, SIZES, limit_s=-1.0, clock=engine.clock)  # type: ignore[arg-type]
    assert engine.asked == [], "there was no time"


def test_longer_responses_of_a_process_fit_as_well() -> None:
    window = 2 * (CONFIG.speculation.max_window + 1)
    for kv_tokens in (SIZES.prompt + SIZES.response + window, 1000, 100_000):
        most = SIZES.most_requests(CONFIG, kv_tokens)
        longest = SIZES.longest_response(most, kv_tokens, CONFIG.speculation)
        assert SIZES.response <= longest <= 158 - SIZES.prompt
        assert most * (SIZES.prompt + longest + window) <= kv_tokens


@pytest.fixture(scope="module")
def config(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Of a mixture of experts, with a small dense draft model."""
    recipe = load(["quickstart_plain", "--model.path", model_dir])
    draft_model = make_dense(tmp_path_factory.mktemp("dense"), "num_hidden_layers=1")
    speculation = replace(
        CONFIG.speculation, drafters=("suffix", "previous", "model", "decoupled"), draft_model=draft_model
    )
    rollout = replace(CONFIG, speculation=speculation)
    return replace(recipe, rollout=rollout, output_dir=str(tmp_path_factory.mktemp("runs")))


def test_a_drafter_process_is_measured_however_it_was_asked_for(config: Config, tmp_path: Path) -> None:
    for mode, drafters, processes in (("auto", ("suffix", "decoupled"), 1), ("decoupled", ("suffix",), 2)):
        speculation = replace(config.rollout.speculation, mode=mode, drafters=drafters)  # type: ignore[arg-type]
        rollout, parallel = (
            replace(config.rollout, speculation=speculation),
            replace(config.parallel, drafters=processes),
        )
        spec = profiling._drafter_spec(replace(config, rollout=rollout, parallel=parallel), 158, tmp_path)
        assert spec is not None
        assert spec.model_dir == config.rollout.speculation.first_draft_model
    assert profiling._drafter_spec(replace(config, rollout=CONFIG), 158, tmp_path) is None


@pytest.fixture(scope="module")
def profiled(config: Config, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(file, what was printed)"""
    printed = tmp_path_factory.mktemp("printed") / "text"
    with printed.open("w") as file:
        written = profiling.run(config, out=None, limit_s=120, console=Console(file=file, width=120))
    return written, printed.read_text()


@pytest.mark.deep
def test_the_table_of_a_real_engine_is_whole(profiled: tuple[Path, str], config: Config, model_dir: str) -> None:
    file, _ = profiled
    assert file == Path(config.output_dir) / "quickstart_plain" / "costs.json"
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    table = CostTable.from_json(file.read_bytes())
    assert table.model == model_dir
    assert table.verify.requests == table.plain.requests == (1, 2, 4, 8, 10)
    assert table.verify.per_request == (1, 2, 3, 5)
    assert {name: grid.per_request for name, grid in table.drafters.items()} == {
        "suffix": (1, 2, 4),
        "previous": (1, 2, 4),
        "model": (1, 2, 4),
    }
    assert table.plain_s(10) == table.verify_s(10, 10)
    assert all(1e-4 < seconds < 10 for row in table.verify.seconds for seconds in row)
    assert 1e-7 < table.draft_s("suffix", 1, 1) < table.draft_s("model", 1, 1)  # a pass of a model takes longer


@pytest.mark.deep
def test_the_drafter_process_of_the_recipe_is_in_it(profiled: tuple[Path, str]) -> None:
    process = CostTable.from_json(profiled[0].read_bytes()).process
    assert process is not None
    for grid in (process.token_s, process.ahead_s):
        assert grid.per_request == (1,)
        assert 1 <= grid.requests[0] < grid.requests[-1] <= 10
        assert all(1e-6 < seconds < 1 for [seconds] in grid.seconds)
    assert set(process.ahead_s.requests) <= {1, 2, 4, 8, 10}


@pytest.mark.deep
def test_what_is_printed_has_the_tables_use(profiled: tuple[Path, str]) -> None:
    file, text = profiled
    assert f"--rollout.speculation.cost-table {file}" in text.replace("\n", "")
    assert "\x1b" not in text


@pytest.mark.deep
def test_speculation_reads_it(profiled: tuple[Path, str]) -> None:
    speculator = Speculator(SpeculationConfig(mode="auto", cost_table=str(profiled[0])), [], clock=time.perf_counter)
    assert speculator.costs.table == CostTable.from_json(profiled[0].read_bytes())


def test_no_model_no_profile(config: Config, tmp_path: Path) -> None:
    def refused(changed: Config, text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            profiling.run(changed, out=tmp_path / "costs.json", limit_s=10, console=Console())
        assert list(tmp_path.iterdir()) == []

    refused(
        replace(config, model=replace(config.model, path="nowhere")),
        "model.path: got .nowhere., expected a folder with",
    )
    speculation = replace(CONFIG.speculation, drafters=("model",), draft_model="nowhere")
    refused(replace(config, rollout=replace(CONFIG, speculation=speculation)), "draft_model: got 'nowhere'")
    unknown = replace(CONFIG.speculation, drafters=("psychic",))
    refused(replace(config, rollout=replace(CONFIG, speculation=unknown)), "got 'psychic'")


def test_an_interrupt_leaves_nothing(model_dir: str, tmp_path: Path) -> None:
    """While the engine starts; later it is the same `finally`."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    words = ["profile", "quickstart_plain", "--model.path", model_dir, "--out", str(tmp_path / "out" / "costs.json")]
    with subprocess.Popen(
        [sys.executable, "-m", "specactor.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Without the tests' own starter: an engine that it forked would be its child.
        env={**{k: v for k, v in os.environ.items() if k != STARTER}, "TMPDIR": str(temporary)},
        preexec_fn=heed_interrupts,
    ) as process:
        assert process.stdout is not None
        assert "starting the engine" in process.stdout.readline()
        while len(children := psutil.Process(process.pid).children(recursive=True)) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == "interrupted; nothing was written\n"
    assert not [child.pid for child in children if process_exists(child.pid)]
    assert list(tmp_path.iterdir()) == [temporary]
    assert not list(temporary.glob("specactor*"))
