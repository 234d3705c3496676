"""A job starts what its plan has, by measured costs, and nothing that no plan has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import GenericAlias
from typing import Any, TypeVar

import pytest

from specactor.config import Config
from specactor.planning.search import planned, shared_table
from specactor.recipes import load
from specactor.rollout.speculation.costs import CostTable, Grid, ProcessCosts

AXIS = (1.0, 512.0)


def grid(per_request: tuple[float, ...], seconds: Any) -> Grid:
    return Grid(
        requests=AXIS, per_request=per_request, seconds=tuple(tuple(seconds(n, k) for k in per_request) for n in AXIS)
    )


def table(*, row_s: float, draft_s: float, token_s: float) -> CostTable:
    """A verify takes 10 ms, and `row_s` for each token of each request; a window of the suffix drafter takes `draft_s`
    for each token; of the process a token of all requests `token_s`."""
    return CostTable(
        model="m",
        device="d",
        date="",
        verify=grid((1.0, 17.0), lambda n, k: 0.01 + row_s * n * k),
        plain=grid((1.0,), lambda n, k: 0.01 + row_s * n),
        drafters={"suffix": grid((1.0, 17.0), lambda n, w: draft_s * w)},
        process=ProcessCosts(token_s=grid((1.0,), lambda n, k: token_s), ahead_s=grid((1.0,), lambda n, k: 1e-6)),
    )


@pytest.fixture
def config() -> Config:
    base = load(["quickstart_plain"])
    speculation = replace(
        base.rollout.speculation,
        mode="auto",
        drafters=("suffix", "decoupled"),
        draft_model=("d",),
        cost_table="costs.json",
    )
    rollout = replace(base.rollout, speculation=speculation)
    distillation = replace(base.distillation, refresh=0.0)
    parallel = replace(base.parallel, engines=2, drafters=1)
    return replace(base, rollout=rollout, parallel=parallel, distillation=distillation)


def test_what_is_planned_is_started(config: Config) -> None:
    found, text = planned(config, table(row_s=1e-7, draft_s=1.0, token_s=1e-4), machines=1)
    assert found == config
    assert "decoupled" in text


def test_no_process_is_started_that_no_plan_has(config: Config) -> None:
    found, text = planned(config, table(row_s=1e-7, draft_s=1e-6, token_s=1.0), machines=1)
    assert found.parallel.drafters == 0
    assert found.rollout.speculation.drafters == ("suffix",)
    assert found.rollout.speculation.mode == "auto"
    assert not found.rollout.speculation.in_use, "nobody loads or makes what nobody drafts with"
    assert "coupled suffix" in text
    assert "no drafter process is started" in text


def test_a_quick_drafter_over_text_takes_no_process_away(config: Config) -> None:
    """How often texts repeat is not known before; how fast a draft model in the engine drafts is."""
    quick = table(row_s=1e-7, draft_s=1e-6, token_s=1e-4)
    found, text = planned(config, quick, machines=1)
    assert found == config
    assert "plan: coupled suffix" in text
    for name, kept in {"model": 0, "examples.custom_drafter:LastFollower": 1}.items():
        speculation = replace(config.rollout.speculation, drafters=("suffix", name, "decoupled"))
        more = replace(quick, drafters={"suffix": quick.drafters["suffix"], name: quick.drafters["suffix"]})
        found, _ = planned(replace(config, rollout=replace(config.rollout, speculation=speculation)), more, machines=1)
        assert found.parallel.drafters == kept, name


def test_a_plan_is_of_the_engines_and_drafters_there_are(config: Config) -> None:
    """Three engines would be faster than two and a drafter, or than two; but two there are."""
    _, text = planned(config, table(row_s=2e-4, draft_s=1.0, token_s=1e-4), machines=1)
    assert text.startswith("plan: decoupled decoupled, window 1, on 2 engines and 1 drafters"), text
    _, text = planned(config, table(row_s=1e-3, draft_s=1.0, token_s=1e-4), machines=1)
    assert text.startswith("plan: off on 2 engines; for the last request decoupled"), text


def test_idle_engines_draft_at_the_end_where_drafters_have_no_devices(config: Config) -> None:
    lending = replace(config, parallel=replace(config.parallel, drafters=0))
    found, text = planned(lending, table(row_s=1e-7, draft_s=1.0, token_s=1e-4), machines=1)
    assert found == lending
    assert text.startswith("plan: off on 2 engines; for the last request decoupled decoupled, window 8, on 1 engines")


def test_a_network_of_drafters_goes_with_them(config: Config) -> None:
    parallel = replace(config.parallel, drafter_hosts=(0, 1))
    found, _ = planned(replace(config, parallel=parallel), table(row_s=1e-7, draft_s=1e-6, token_s=1.0), machines=2)
    assert (found.parallel.drafters, found.parallel.drafter_hosts) == (0, ())


def test_where_drafts_never_pay_nobody_drafts(config: Config) -> None:
    dear = table(row_s=1e-7, draft_s=1.0, token_s=1.0)
    found, text = planned(config, dear, machines=1)
    assert (found.rollout.speculation.mode, found.parallel.drafters) == ("off", 0)
    assert "plan: off" in text
    lending = replace(config, parallel=replace(config.parallel, drafters=0))
    assert lending.lends_devices
    assert not planned(lending, dear, machines=1)[0].lends_devices


def test_where_only_the_last_request_gains_drafting_stays_on(config: Config) -> None:
    found, text = planned(config, table(row_s=0.01, draft_s=1e-6, token_s=1.0), machines=1)
    assert found.rollout.speculation.mode == "auto"
    assert "plan: off" in text
    assert "for the last request coupled" in text


def test_a_draft_model_that_learns_is_kept(config: Config) -> None:
    learning = replace(config, distillation=replace(config.distillation, refresh=0.03))
    found, text = planned(learning, table(row_s=1e-7, draft_s=1.0, token_s=1.0), machines=1)
    assert found == learning
    assert "plan: off" in text


def test_a_table_that_lacks_a_drafter_plans_nothing(config: Config) -> None:
    found, text = planned(config, replace(table(row_s=0.1, draft_s=1.0, token_s=1.0), process=None), machines=1)
    assert found == config
    assert "lacks decoupled" in text


T = TypeVar("T")


class OneOfThree:
    """A rank of a job whose ranks run one after the other, rank 0 first."""

    def __init__(self, rank: int, told: list[Any]) -> None:
        self.rank, self._told = rank, told

    def together(self, phase: str, work: Callable[[], T]) -> T:
        return work()

    def gather(self, value: T, kind: type[T] | GenericAlias) -> list[T]:
        self._told[self.rank] = value
        return self._told


def test_hosts_whose_files_differ_plan_alike(config: Config, tmp_path: Path) -> None:
    """The drafter process is quick by rank 0's file and useless by rank 1's, and rank 2 has none."""
    quick, slow = (table(row_s=1e-7, draft_s=1.0, token_s=token_s) for token_s in (1e-4, 1.0))
    files = [tmp_path / name / "costs.json" for name in ("first", "second", "gone")]
    for file, own in zip(files, (quick, slow), strict=False):
        own.write(file)
    told: list[Any] = [None] * 3
    plans = [
        planned(config, shared_table(str(file), OneOfThree(rank, told)), machines=3)  # type: ignore[arg-type]
        for rank, file in enumerate(files)
    ]
    assert plans[0] == plans[1] == plans[2] == planned(config, quick, machines=3)
    assert planned(config, CostTable.read(files[1]), machines=3) != plans[0], "alone, rank 1 would plan otherwise"
