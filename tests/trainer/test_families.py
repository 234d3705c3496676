"""Every family of models that is offered can be trained: built, exported whole, and computed as transformers does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lib.ranks import run_ranks
from tests.trainer.families_script import FAMILIES


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("families")
    run_ranks(1, "tests.trainer.families_script", folder, folder=folder)
    result: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_built_and_exported_whole_and_computes_as_transformers(found: dict[str, Any], family: str) -> None:
    """Also where mbridge builds another model: no gate of the shared expert in Qwen2-MoE, scaled experts in Mixtral."""
    assert found["families"][family]["wrong"] == []
    if family == "glm4_moe":
        assert "rotary embedding: only the whole head" in found["families"][family]["not on a CPU"]
    else:
        assert found["families"][family]["gap"] < 1e-4


def test_all_families_that_are_offered_were_tried_and_another_is_refused_by_name(found: dict[str, Any]) -> None:
    assert found["known"] == sorted([*FAMILIES, "mimo"])
    assert found["refused"].startswith("model.path: got 'deepseek_v3', expected one of ['glm4_moe', 'llama', ")
    assert found["refused"].endswith("Choose a model of a supported type.")
