"""Experts that the engine chose, taken again in the trainer's passes (rollout routing replay, R3, arXiv 2510.11370).

In a mixture of experts a rounding error may send a token to another expert, and its log-probability far away. With the
engine's choice the trainer differs by rounding alone; the weights of the chosen experts are the trainer's own.

Shapes: T tokens of a micro-batch on this rank, L layers of the model, K experts per token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

FREE = -1
"""In place of experts where the engine's choice is not known: the router's own. It is so in padding, and for the last
token of a sequence, whose output nobody reads."""


class RoutingReplay:
    """What the routers of this rank's chunks take experts from; the object that Megatron asks for a top-k.

    A layer that is recomputed in the backward pass gets the experts of its forward pass again: layers see
    micro-batches in one order, forward and backward.
    """

    def __init__(self, chunks: list[Any], *, recomputes: bool) -> None:
        """`recomputes`: layers are computed again in the backward pass."""
        self._experts_TLK: Tensor | None = None
        self._is_forward = False
        self.routers = [
            _LayerReplay(self, layer.layer_number - 1, recomputes=recomputes)
            for chunk in chunks
            for layer in chunk.decoder.layers
            if hasattr(layer.mlp, "router") and layer.mlp.router.__dict__.update(router_replay=None) is None
        ]

    @contextmanager
    def forward(self, experts_TLK: Tensor | None) -> Iterator[None]:
        """The forward pass of a chunk over one micro-batch; None: routers are free."""
        self._experts_TLK, self._is_forward = experts_TLK, True
        try:
            yield
        finally:
            self._experts_TLK, self._is_forward = None, False
