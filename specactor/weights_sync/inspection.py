"""Rank calls that look into an engine rank without the receiver: what do its parameters hold, and what should they?

Name them to `Engine.rank_call` by their paths, ``specactor.weights_sync.inspection:digests``. Not part of a sync.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open

from specactor.weights_sync.receiver import EngineRank


def digests(rank: EngineRank, payload: bytes) -> bytes:
    """SHA-256 of every parameter's bytes, by SGLang's name, as JSON."""
    return msgspec.json.encode({name: _sha256(tensor) for name, tensor in rank.model.named_parameters()})


def digests_of_folder(rank: EngineRank, payload: bytes) -> bytes:
    """Return digests of the parameters that SGLang's own loader makes of a Hugging Face folder (path: `payload`).

    The rank holds that folder's weights afterwards; what the loader leaves out becomes NaN. KV caches are
    stale: flush them before generating.
    """
    rank.begin_weight_update()
    with torch.no_grad():
        for parameter in rank.model.parameters():
            parameter.fill_(torch.nan)
        rank.model.load_weights(_tensors(Path(payload.decode())))  # type: ignore[operator]
    rank.end_weight_update()
    return digests(rank, b"")


def seconds_to_load(rank: EngineRank, payload: bytes) -> bytes:
    """(from tensors in memory, from files) seconds of SGLang's own load of a Hugging Face folder (path: `payload`), as
    JSON. The rank holds that folder's weights afterwards."""
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


def _sha256(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
    return hashlib.sha256(data.numpy().data).hexdigest()
