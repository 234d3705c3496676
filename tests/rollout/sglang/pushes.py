"""Pushes of a draft model's weights, whole or damaged."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from safetensors.torch import load_file

from specactor.weights_sync.draft_push import DraftSender
from specactor.weights_sync.messages import DraftWeights

DAMAGES = {"flipped": "wrong digest", "torn": "wrong digest", "cut short": "the trainer sent too little"}
"""A bit is another; the second half of the memory is not written; half of the tensors are not named. And what whoever
refuses it says."""


class Pushes:
    """Of versions that count up."""

    def __init__(self, sender: DraftSender, bring: Callable[[DraftWeights], str], *, version: int = 0) -> None:
        """Args: what hands weights over, and tells why they were not taken; version of the weights there are."""
        self.version = version
        self._sender, self._bring = sender, bring

    def pack(self, folder: str) -> DraftWeights:
        self.version += 1
        return self._sender.pack(load_file(f"{folder}/model.safetensors").items(), version=self.version)

    def __call__(self, folder: str, damage: str = "") -> str:
        """Why it was refused, or empty."""
        weights = self.pack(folder)
        assert self._sender._buffer is not None
        data, middle = self._sender._buffer.data, len(weights.slots) // 2
        if damage == "flipped":
            data[weights.slots[3].offset + 5] ^= 4
        elif damage == "torn":
            data[weights.slots[middle].offset :] = 0
        elif damage == "cut short":
            weights = msgspec.structs.replace(weights, slots=weights.slots[:middle])
        return self._bring(weights)
