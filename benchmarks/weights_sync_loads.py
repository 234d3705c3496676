"""A rank call by path: how long an engine rank takes to load a Hugging Face folder by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open

from specactor.weights_sync.receiver import EngineRank


def seconds_to_load(rank: EngineRank, payload: bytes) -> bytes:
    """Return SGLang's seconds to load a folder (from tensors in memory, from files), as JSON; it stays loaded."""
    folder = Path(payload.decode())
    tensors = [(name, tensor.clone()) for name, tensor in _tensors(folder)]
    seconds = []
    rank.begin_weight_update()
    with torch.no_grad():
        for weights in (tensors, _tensors(folder)):
            start = time.perf_counter()
            rank.model.load_weights(weights)  # type: ignore[operator]
            seconds.append(time.perf_counter() - start)
    rank.end_weight_update()
    return msgspec.json.encode(seconds)


def _tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  (not a dict)
                yield name, weights.get_tensor(name)
