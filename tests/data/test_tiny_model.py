from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specactor.config import TinyModelConfig
from specactor.data.tiny_model import make_tiny_model
from specactor.errors import ConfigError
from tests.data.conftest import SHAPE

READ_BACK = """
import sys, torch
from specactor.cpu import torchvision_ops
torch.version.cuda is None and torchvision_ops.install()
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
c, g = model.config, model.generation_config
assert type(model).__name__ == "Qwen3MoeForCausalLM", type(model)
assert (c.tie_word_embeddings, c.norm_topk_prob, c.router_aux_loss_coef) == (False, True, 0.0), c
assert c.rope_parameters["rope_theta"] == 10000.0, c
assert (c.vocab_size, c.num_hidden_layers, c.num_experts, c.num_experts_per_tok) == (104, 1, 8, 2), c
assert (c.eos_token_id, c.pad_token_id, g.eos_token_id, g.pad_token_id) == (2, 0, 2, 0), g
assert all(p.dtype == torch.float32 for p in model.parameters())
assert model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()
"""


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def test_transformers_reads_the_model_back(tiny_model: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ_BACK, str(tiny_model)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_weights_have_the_names_of_the_published_checkpoints(tiny_model: Path) -> None:
    weights = load_file(tiny_model / "model.safetensors")
    assert weights["model.layers.0.mlp.experts.7.gate_proj.weight"].shape == (SHAPE.expert_size, SHAPE.hidden_size)
    assert weights["lm_head.weight"].shape == (104, SHAPE.hidden_size)
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    routers = weights["model.layers.0.mlp.gate.weight"]
    assert 0.01 < float(routers.std()) < 0.03, "routers must not be left uninitialised or zero"


def test_a_seed_gives_the_same_bytes_and_another_seed_others(tiny_model: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    for seed, name in enumerate(("again", "other")):
        make_tiny_model(SHAPE, seed, tmp_path / name)
    assert torch.equal(torch.get_rng_state(), state)
    assert digests(tmp_path / "again") == digests(tiny_model)
    changed = {name for name, value in digests(tmp_path / "other").items() if value != digests(tiny_model)[name]}
    assert changed == {"model.safetensors"}
    assert list(tiny_model.parent.iterdir()) == [tiny_model], "nothing unfinished is left"


def test_an_existing_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="expected a path that does not exist"):
        make_tiny_model(SHAPE, 0, tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir()) == []


def test_the_default_is_the_size_of_the_quickstart() -> None:
    tiny = TinyModelConfig()
    experts = tiny.num_experts * 3 * tiny.expert_size * tiny.hidden_size
    attention = tiny.hidden_size * tiny.head_dim * (2 * tiny.num_heads + 2 * tiny.num_kv_heads)
    total = tiny.num_layers * (experts + attention) + 2 * 104 * tiny.hidden_size
    assert 1.7e6 < total < 1.9e6
