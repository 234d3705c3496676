"""Rank calls by path that compare an engine rank's parameters with SGLang's own load of a Hugging Face folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open

from specactor.weights_sync.receiver import EngineRank


def digests(rank: EngineRank, payload: bytes) -> bytes:
    """Return SHA-256 of every parameter, by SGLang's name, as JSON."""
    return msgspec.json.encode({name: _sha256(tensor) for name, tensor in rank.model.named_parameters()})


def digests_of_folder(rank: EngineRank, payload: bytes) -> bytes:
    """Return digests after SGLang's load of a Hugging Face folder (`payload`), which stays loaded; NaN is what
    it omits."""
    rank.begin_weight_update()
    with torch.no_grad():
        for parameter in rank.model.parameters():
            parameter.fill_(torch.nan)
        rank.model.load_weights(tensors_in(Path(payload.decode())))  # type: ignore[operator]
    rank.end_weight_update()
    return digests(rank, b"")


def tensors_in(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  (not a dict)
                yield name, weights.get_tensor(name)


def _sha256(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
    return hashlib.sha256(data.numpy().data).hexdigest()
