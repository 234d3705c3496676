"""First starts of drafters that fail are tried again, as engines' are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specactor.errors import EngineError
from specactor.rollout import drafter_pool
from specactor.rollout.child_process import StartRefusedError
from specactor.rollout.decoupled.spec import DrafterSpec
from specactor.rollout.drafter_pool import DrafterPool
from tests.rollout.conftest import Footprint
from tests.rollout.decoupled.test_supervisor import assert_drafts, make_drafter_spec

__all__ = ["make_drafter_spec"]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_pool, "RETRY_PAUSE_S", 0.05)


def num_starts(spec: DrafterSpec) -> int:
    return len(Path(spec.log_file + ".starts").read_text())


def test_a_first_start_that_fails_is_tried_again(make_drafter_spec: Callable[..., DrafterSpec], tmp_path: Path) -> None:
    specs = [
        make_drafter_spec(name, index=i, log_file=str(tmp_path / f"{i}.log"), max_restarts=2)
        for i, name in enumerate(("scripted", "full_twice"))
    ]
    with DrafterPool(specs) as pool:
        first = pool.drafters[0]
        pool.wait_ready()
        assert pool.drafters[0] is first
        for spec in specs:
            assert_drafts(spec)
    assert num_starts(specs[1]) == 3


@pytest.mark.parametrize(
    ("continuer", "error", "starts"),
    [
        ("full_twice", "(?s)drafter 0 did not start: the process died.*RuntimeError: out of memory", 2),
        ("refuses", "drafter 0 did not start: ValueError: no such weights", 1),
    ],
)
def test_a_first_start_that_fails_too_often_or_says_why_ends_the_run(
    make_drafter_spec: Callable[..., DrafterSpec], continuer: str, error: str, starts: int
) -> None:
    spec = make_drafter_spec(continuer, max_restarts=1)
    pool = DrafterPool([spec])
    footprint = Footprint.of(pool.drafters[0].pid)
    with pytest.raises(EngineError, match=error) as caught:
        pool.wait_ready()
    assert isinstance(caught.value, StartRefusedError) == (starts == 1)
    assert num_starts(spec) == starts
    footprint.assert_gone(within_s=0.1)
