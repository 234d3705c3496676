"""The policy's MTP layer learns in the policy's updates, which are bit for bit those without it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.lib.ranks import run_alone, run_ranks

LAYOUTS = {1: {"one": {}}, 2: {"TP2": {"tensor": 2, "expert_tensor": 2}, "DP2": {}}}
NAMES = ("one", "TP2", "DP2")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By layout."""
    folder = tmp_path_factory.mktemp("mtp")
    run_alone("tests.rollout.sglang.make_mimo", folder / "policy", "random", 96)
    found: dict[str, Any] = {}
    for world, layouts in LAYOUTS.items():
        file = folder / f"{world}.json"
        run_ranks(world, "tests.trainer.mtp_script", folder / "policy", json.dumps(layouts), file, folder=folder)
        found |= json.loads(file.read_text())
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_layer_is_loaded_and_exported_bit_for_bit(results: dict[str, Any], name: str) -> None:
    assert results[name]["wrong_weights"] == []


@pytest.mark.parametrize("name", NAMES)
def test_its_loss_is_that_of_its_definition_and_falls(results: dict[str, Any], name: str) -> None:
    for own, reference in zip(("mtp_losses", "told"), results["reference_losses"], strict=True):
        first, *_, last = results[name]["trained"][own]
        assert first == pytest.approx(reference, rel=1e-4)
        assert last < 0.99 * first
    assert results[name]["untrained"]["told"] == [None] * 3, "nothing is said of a layer that does not learn"


@pytest.mark.parametrize("name", NAMES)
def test_the_policy_learns_as_without_it(results: dict[str, Any], name: str) -> None:
    """Weights bit for bit, and all figures of a step; with a layer that has an influence they differ."""
    trained, untrained = results[name]["trained"], results[name]["untrained"]
    assert trained["policy"] == untrained["policy"]
    assert trained["steps"] == untrained["steps"]
    assert {n for n, d in trained["mtp"].items() if untrained["mtp"][n] == d} == set(), "it learned"
    for mistake in ("attached", "counted"):
        assert results[name][mistake]["policy"] != untrained["policy"]


@pytest.mark.parametrize("name", NAMES[1:])
def test_it_learns_the_same_under_any_layout(results: dict[str, Any], name: str) -> None:
    one, other = (results[layout]["trained"]["mtp_weights"] for layout in ("one", name))
    assert one.keys() == other.keys()
    for tensor in one:
        torch.testing.assert_close(torch.tensor(other[tensor]), torch.tensor(one[tensor]), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_goes_on_exactly(results: dict[str, Any], name: str) -> None:
    trained, resumed = results[name]["trained"], results[name]["resumed"]
    assert (resumed["policy"], resumed["mtp"]) == (trained["policy"], trained["mtp"])


@pytest.mark.parametrize("name", NAMES)
def test_a_sync_hands_over_what_an_export_writes(results: dict[str, Any], name: str) -> None:
    assert results[name]["handed_over"] == []
