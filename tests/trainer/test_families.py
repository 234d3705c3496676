"""Every family of models that is offered can be trained: built, exported whole, and computed as transformers does."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.lib.ranks import run_ranks
from tests.trainer.families_script import ALIKE, FAMILIES, OTHER_SUMS, REFUSED

READ_HERE = {"rope_parameters", "sliding_window", "layer_types", "norm_topk_prob"}
NO_INFLUENCE = {
    *("pad_token_id", "initializer_range"),
    *("router_aux_loss_coef", "output_router_logits", "router_jitter_noise"),  # of another loss, and of its training
    "topk_group",  # of one group
}
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}  # names of one field


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


@pytest.mark.parametrize("family", OTHER_SUMS)
def test_the_chosen_experts_weights_add_up_as_the_model_says(found: dict[str, Any], family: str) -> None:
    """mbridge takes what published models say; here the others' sums were 1.4 and 1.6 nats away."""
    assert found["sums"][family]["gap"] < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_knows_how_many_experts_it_has(found: dict[str, Any], family: str) -> None:
    """By whichever name; a dense model has none, as older checkpoints say."""
    mixed = family in ("mixtral", "glm4_moe") or family.endswith("_moe")
    assert found["families"][family]["experts"] == (4 if mixed else None)


def test_a_tied_llama_is_loaded_and_exported_over_two_stages(tmp_path: Path) -> None:
    """Its last stage has an output layer, which no file names."""
    run_ranks(2, "tests.trainer.families_script", tmp_path, folder=tmp_path)
    for rank in range(2):
        tied = json.loads((tmp_path / f"tied-{rank}.json").read_text())
        assert tied["wrong"] == []
        assert tied["gap"] < 1e-4


def test_all_families_that_are_offered_were_tried_and_another_is_refused_by_name(found: dict[str, Any]) -> None:
    assert found["known"] == sorted([*FAMILIES, "mimo"]) == sorted(found["checked"])
    assert found["deepseek"].startswith("model.path: got 'deepseek_v3', expected one of ['glm4_moe', 'llama', ")
    assert found["deepseek"].endswith("Choose a model of a supported type.")


def test_a_model_that_would_be_built_as_another_is_refused_by_the_fields_name(found: dict[str, Any]) -> None:
    assert found["alike"] == [""] * len(ALIKE)
    assert found["early"].startswith("model.path: got 'mlp_bias True in "), "before engines have started"
    for (kind, change, named), said in zip(REFUSED, found["refused"], strict=True):
        assert said.startswith(f"model.path: got {f'{named} in '!r}"[:-1]), (kind, change)
        assert f", which models of type {kind} are built with. Another model would be trained" in said


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_that_transformers_reads_is_read_or_checked(found: dict[str, Any], family: str) -> None:
    """By mbridge, or here; of a model type that learns a new field, this says so."""

    def source(package: str, *files: str) -> str:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        return "".join((Path(spec.origin).parent / file).read_text() for file in files)

    computed = source("transformers", f"models/{family}/modeling_{family}.py")
    bridge = source("mbridge", "core/bridge.py", "core/llm_bridge.py", f"models/{family.replace('_', '')}.py")
    fields = {*re.findall(r"\bconfig\.([a-z]\w*)", computed), *re.findall(r"config, \"(\w+)\"", computed)}
    read = {*re.findall(r"hf_config\.(\w+)", bridge), *re.findall(r"\"(\w+)\"", bridge)}
    read |= EXPERTS if read & EXPERTS else set()
    assert "hidden_act" in fields - read, "the check would see one"
    assert fields - read - {*found["checked"][family]} <= READ_HERE | NO_INFLUENCE
