"""Heads that SGLang would load and serve wrongly are refused by name, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from specactor.errors import EngineError
from specactor.rollout.sglang import draft_runner, head_runner

CONFIG = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 8, "eagle_config": None}


def refuse(folder: Path, *, weights: str = "lm_head.weight", hierarchical: bool = False, **fields: object) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    if weights:
        save_file({weights: torch.zeros(8, 4)}, folder / "model.safetensors")
    else:
        torch.save({"lm_head.weight": torch.zeros(8, 4)}, folder / "pytorch_model.bin")
    head_runner.refuse_unfit(folder, hierarchical_cache=hierarchical)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false"),
        ({"tie_word_embeddings": True}, "tied embeddings"),
        ({"draft_vocab_size": None, "weights": "fc.weight"}, "neither draft_vocab_size nor lm_head"),
        ({"weights": ""}, r"no \*.safetensors"),
        ({"hierarchical": True}, "enable_hierarchical_cache"),
        ({"hierarchical": True, "architectures": ["MiMoForCausalLM"]}, "got mtp and enable_hierarchical_cache"),
    ],
)
def test_an_unfit_head_is_refused(tmp_path: Path, how: dict[str, object], named: str) -> None:
    with pytest.raises(EngineError, match=named):
        refuse(tmp_path, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"draft_vocab_size": None},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}},
        {"architectures": ["LlamaForCausalLM"], "hierarchical": True, "tie_word_embeddings": True, "weights": ""},
    ],
)
def test_others_are_not(tmp_path: Path, how: dict[str, object]) -> None:
    refuse(tmp_path, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [[], None])
def test_no_layers_are_the_usual_three(layers: list[int] | None) -> None:
    """So many features are kept, and SGLang is asked for its own choice and not for none."""
    asked: list[object] = []

    class Target:
        model = torch.nn.Module()

        def set_eagle3_layers_to_capture(self, layers: object) -> None:
            asked.append(layers)

    eagle = {"eagle_aux_hidden_state_layer_ids": layers}
    config = SimpleNamespace(architectures=["LlamaForCausalLMEagle3"], eagle_config=eagle, hidden_size=4)
    head_config = SimpleNamespace(hf_config=config, hidden_size=4)
    assert draft_runner.num_features(head_config) == 3 * 4
    region = SimpleNamespace(region=lambda _: torch.no_grad())
    head = SimpleNamespace(
        model_config=head_config,
        token_to_kv_pool=SimpleNamespace(memory_saver_adapter=region),
        req_to_token_pool=SimpleNamespace(size=2),
        dtype=torch.float32,
        device="cpu",
    )
    target = SimpleNamespace(model=Target(), req_to_token_pool=SimpleNamespace(req_to_token=None))
    head_runner.TargetStates(target, head, num_slots=2)
    assert asked == [None]
