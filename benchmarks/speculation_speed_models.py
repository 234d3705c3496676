"""A trained model made heavy: about 100 M parameters that compute the same function, so that arithmetic dominates.

A model of random weights writes noise, which nobody can draft. So the trained one is grown (Net2Net, arXiv 1511.05641):
wider, with more heads, wider experts and more layers, whose new weights are random and whose outputs are multiplied by
zeros. It costs what a model of its size costs and writes what the trained one writes.

Invariant: the law of the next token is that of the small model, up to rounding.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYERS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of the grown model; the rest is as it was."""

    num_layers: int = 8
    hidden_size: int = 512
    num_heads: int = 16
    num_kv_heads: int = 8
    expert_size: int = 960


def grow(small: Path, folder: Path, shape: Shape) -> None:
    """Write the grown model into the new `folder`. The hidden size must grow by a square of a power of two, and the
    ratio of query heads to key heads must stay: else it would not be the same function."""
    config = json.loads((small / "config.json").read_text())
    factor = _factor(config, shape)
    grown = _Grown(config, shape, factor**-0.5)
    weights = load_file(small / "model.safetensors")
    tensors = {name: grown.tensor(name, tensor) for name, tensor in weights.items()}
    for layer in range(config["num_hidden_layers"], shape.num_layers):
        for name, tensor in weights.items():
            if name.startswith("model.layers.0."):
                new = name.replace(".0.", f".{layer}.", 1)
                tensors[new] = grown.silent(new, tensor)
    folder.mkdir(parents=True)
    for file in small.iterdir():
        if file.suffix == ".json" and file.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copy(file, folder)
    config |= {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "moe_intermediate_size": shape.expert_size,
        "rms_norm_eps": config["rms_norm_eps"] / factor,
    }
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _factor(config: dict[str, int], shape: Shape) -> float:
    """Return how many times as wide; ValueError where it would not be the same function."""
    factor = shape.hidden_size / config["hidden_size"]
    same_groups = shape.num_heads * config["num_key_value_heads"] == shape.num_kv_heads * config["num_attention_heads"]
    if factor not in (1, 4, 16) or not same_groups:
        raise ValueError(f"shape: got {shape}, expected hidden_size times 1, 4 or 16 and equal heads per key head")
    return factor


def grow_head(small: Path, folder: Path, shape: Shape) -> None:
    """Write the EAGLE-3 head of the small model as one of the grown model, which drafts the same."""
    config = json.loads((small / "config.json").read_text())
    factor = _factor(config, shape)
    grown = _Grown(config, shape, factor**-0.5, inputs=2, layers=len(config["eagle_config"][LAYERS]))
    tensors = {name: grown.tensor(name, tensor) for name, tensor in load_file(small / "model.safetensors").items()}
    folder.mkdir(parents=True)
    config |= {
        "hidden_size": shape.hidden_size,
        "target_hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "intermediate_size": shape.expert_size,
        "rms_norm_eps": config["rms_norm_eps"] / factor,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


class _Grown:
    def __init__(self, config: dict[str, int], shape: Shape, norm: float, *, inputs: int = 1, layers: int = 0) -> None:
        """Args: hidden states side by side that attention reads; of so many layers that a head reads."""
        head_dim = config["head_dim"]
        self._norm = norm  # the mean square over more columns, the new ones zero, is smaller
        hidden, expert = shape.hidden_size, shape.expert_size
        queries, keys = shape.num_heads * head_dim, shape.num_kv_heads * head_dim
        self._beside = dict.fromkeys(("q_proj", "k_proj", "v_proj"), inputs) | {"fc": layers}
        self._sizes = {
            "fc": (hidden, layers * hidden),
            "q_proj": (queries, inputs * hidden),
            "k_proj": (keys, inputs * hidden),
            "v_proj": (keys, inputs * hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (expert, hidden),
            "up_proj": (expert, hidden),
            "down_proj": (hidden, expert),
        }  # others get columns alone
        self._hidden = hidden
        self._random = torch.Generator().manual_seed(0)

    def tensor(self, name: str, small: Tensor) -> Tensor:
        """The trained weights in a corner; around them random ones where the result is multiplied by zero later."""
        kind = name.split(".")[-2]
        if small.dim() == 1:
            return small.clone() if kind in ("q_norm", "k_norm") else self._wide_norm(small)
        rows, columns = self._size(kind, small)
        large = torch.zeros(rows, columns)
        if kind in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            large[small.shape[0] :] = self._noise(rows - small.shape[0], columns)
        each = columns // (beside := self._beside.get(kind, 1))
        for k, part in enumerate(small.chunk(beside, 1)):
            large[: small.shape[0], k * each : k * each + part.shape[1]] = part
        return large

    def silent(self, name: str, small: Tensor) -> Tensor:
        """Of a layer that adds nothing."""
        kind = name.split(".")[-2]
        if small.dim() == 1:
            return small.clone() if kind in ("q_norm", "k_norm") else self._wide_norm(small)
        rows, columns = self._size(kind, small)
        return torch.zeros(rows, columns) if kind in ("o_proj", "down_proj") else self._noise(rows, columns)

    def _size(self, kind: str, small: Tensor) -> tuple[int, int]:
        return self._sizes.get(kind, (small.shape[0], self._hidden))

    def _wide_norm(self, small: Tensor) -> Tensor:
        large = torch.ones(self._hidden)
        large[: len(small)] = small * self._norm
        return large

    def _noise(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=self._random).mul_(columns**-0.5)
