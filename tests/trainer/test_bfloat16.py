"""The trainer in bfloat16, where Megatron wraps the model as it does on a GPU."""

from __future__ import annotations

import math
from pathlib import Path

from specactor.config import TinyModelConfig
from specactor.data.tiny_model import make_tiny_model
from tests.lib.scripts import found_by
from tests.trainer.conftest import LIMIT_S, environment

SHAPE = TinyModelConfig(num_layers=2, hidden_size=128, num_experts=4, expert_size=64)


def test_a_wrapped_model_is_trained_saved_and_handed_over(tmp_path: Path) -> None:
    """Under the names that mbridge knows: without the wrapper's `module.` before them."""
    make_tiny_model(SHAPE, 0, tmp_path / "model")
    found = found_by("tests.trainer.bfloat16_script", tmp_path / "model", tmp_path, limit_s=LIMIT_S, **environment())
    assert found["wrapper"] == "Float16Module"  # else this test would show nothing
    assert "embedding.word_embeddings.weight" in found["names"]
    assert not [name for name in found["names"] if name.startswith("module.")]
    assert found["dtypes"] == ["torch.bfloat16"]
    assert found["changed"]
    assert found["shards_are_the_model"]
    assert found["restored"]
    assert found["in_shared_memory"]  # whatever trains and loads writes there
    first, again, repeated = found["losses"]
    assert math.isfinite(first)
    assert again == repeated
    # The wrapper makes a copy in float32 of all logits, which takes two thirds of what they do, and changes no bit.
    assert (found["logits"], found["copied logits"]) == (["torch.bfloat16"], ["torch.float32"])
    assert found["learned as from copied logits"]
    assert found["gathers_on_the_host"]  # a GPU would hold the whole optimizer beside live engines
    # All of it ran in the deterministic modes; what libraries read of the environment is there before a GPU is used.
    settled = found["deterministic"]
    assert settled["torch"]
    assert settled["megatron"]
    ours = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring"}
    assert settled.items() >= (ours | {"NVIDIA_TF32_OVERRIDE": ""}).items()
    assert settled["of engines"] == []
    assert found["the user's"]["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert found["the user's"]["tf32"] == [True, True]
    assert found["float32"]["tf32"] == [False, False]
    assert found["float32"]["NVIDIA_TF32_OVERRIDE"] == "0"
    assert not found["float32"]["torch"]
