"""Rollouts in the paper's settings: what the page says holds for small ones, and the page is of these settings."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.paper_rollouts import AUTO, COLUMNS, Setting, main_settings, row, runs, sensitivity
from benchmarks.results import RESULTS, stored
from specactor.simulator.rollout import run

SMALL = replace(main_settings()[0], batch=16)


def cells(setting: Setting) -> dict[str, str]:
    return dict(zip(COLUMNS, row(setting, 8), strict=True))


def test_dear_draft_steps_ruin_a_fixed_window_and_not_auto() -> None:
    cheap, dear = cells(SMALL), cells(replace(SMALL, step_ms=8.0))
    assert float(cheap["vanilla"]) > 1.2
    assert float(dear["vanilla"]) < 0.8
    assert float(dear["auto"]) > 0.98
    assert float(cheap["auto"]) > float(dear["auto"])


def test_all_modes_generate_the_same_tokens() -> None:
    found = runs(SMALL, 8)
    assert len({of.tokens for of in found}) == 1
    assert [of.plan.mode for of in found[:3]] == ["off", "coupled", "decoupled"]


def test_auto_ends_requests_earlier_on_average_and_not_the_last() -> None:
    """Why a fixed plan can have the shorter rollout: `auto` makes engines fastest, not their longest request."""
    [setting] = [setting for setting in sensitivity() if setting.name.endswith("round + 30 ms")]
    job = setting.job(16)
    fixed = run(replace(job, policy=replace(AUTO, reconfigure=False))).steps[0].outcome.finish_s
    chosen = run(replace(job, policy=AUTO)).steps[0].outcome.finish_s
    assert chosen.mean() < 0.99 * fixed.mean()
    assert chosen.max() > fixed.max()


def test_the_page_is_of_these_settings() -> None:
    page = (RESULTS / "paper_rollouts.md").read_text()
    names = [setting.name for setting in (*main_settings(), *sensitivity())]
    assert [of["setting"] for of in stored("paper_rollouts")] == names
    assert "Simulated, not measured" in page
    assert "Measured:" not in page
