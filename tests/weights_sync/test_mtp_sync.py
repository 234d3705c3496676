"""An MTP layer that learned is synced bit for bit, and accepted more than a random one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specactor.rollout.warm_starter import WarmStarter
from tests.lib.ranks import run_alone, run_ranks


@pytest.fixture(scope="module")
def results(warm_starter: WarmStarter, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("mtp")
    run_alone("tests.rollout.sglang.make_mimo", folder / "policy", "untaught", 96)
    run_ranks(1, "tests.weights_sync.mtp_script", folder / "policy", folder, folder=folder)
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def test_engines_hold_what_an_export_writes(results: dict[str, Any]) -> None:
    """After a push by buckets, and after one by the plan."""
    assert results["wrong"] == []
    assert results["rounds"][0] > 0
    assert results["rounds"][1] == 0


def test_a_layer_that_learned_is_accepted_much_more(results: dict[str, Any]) -> None:
    """From what the policy said, which stays as it is; and no token depends on it."""
    assert results["after"] > results["before"] + 0.2
    assert results["same"] == [True, True, True]
    assert results["stays"]
