"""What ranks note of their shards for a weight sync's plan: every element's place, with little memory."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specactor.config import TinyModelConfig
from specactor.data.tiny_model import make_tiny_model
from tests.lib.ranks import run_alone, run_ranks
from tests.trainer.conftest import LAYOUTS_2

NAMES = (*LAYOUTS_2, "MiMo TP2")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By layout, of both ranks."""
    folder = tmp_path_factory.mktemp("shards")
    make_tiny_model(TinyModelConfig(num_layers=6, hidden_size=64, num_experts=4, expert_size=32), 0, folder / "moe")
    run_alone("tests.rollout.sglang.make_mimo", folder / "mimo", "random", 96)
    spec: dict[str, Any] = {
        name: {"model": str(folder / "moe"), "parallel": parallel} for name, parallel in LAYOUTS_2.items()
    }
    spec["MiMo TP2"] = {"model": str(folder / "mimo"), "parallel": {"tensor": 2}, "spoilt": True}
    run_ranks(2, "tests.trainer.shards_script", json.dumps(spec), folder / "found.json", folder=folder)
    result: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return result


@pytest.mark.parametrize("name", NAMES)
def test_elements_lie_where_numbering_each_of_them_finds_them(found: dict[str, Any], name: str) -> None:
    assert [rank["wrong"] for rank in found[name]] == [[], []]


def test_a_plan_that_overlooks_the_order_in_a_row_is_noticed(found: dict[str, Any]) -> None:
    """MiMo's MTP layer has its halves exchanged, and shards of columns make up a row."""
    for rank in found["MiMo TP2"]:
        assert any("eh_proj" in name for name in rank["spoilt"])


@pytest.mark.parametrize("name", NAMES)
def test_a_large_parameter_is_planned_for_with_few_bytes_per_element(found: dict[str, Any], name: str) -> None:
    """An embedding of 600 million elements would take 60 GB with a few int64 for each. Digits take 2 bytes, and as much
    once or twice more where shards are joined."""
    for rank in found[name]:
        assert rank["peaks"]
        assert max(rank["peaks"].values()) < 12
