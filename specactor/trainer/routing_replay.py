"""Routing replay: the trainer takes the engine's experts (R3, arXiv 2510.11370), where rounding might choose others.

Shapes: T tokens of a micro-batch on this rank, K experts per token, X = layers times K, E experts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core import parallel_state
from torch import Tensor

from specactor.errors import DataError
from specactor.trainer.model import Policy
from specactor.types import TrainSequence


class RoutingReplay:
    """Gives experts to routers, also to layers that the backward pass computes again."""

    def __init__(self, policy: Policy) -> None:
        config = policy.config
        config.moe_router_fusion = False  # the fused kernel asks nobody for experts
        self._width = config.num_layers * config.moe_router_topk
        self.recomputes = config.recompute_granularity == "full"
        self._is_divided = config.sequence_parallel
        self.experts_TX: Tensor | None = None
        self.is_forward = False
        self._layers = []
        for layer in policy.layers():
            if hasattr(layer.mlp, "router"):
                layer.mlp.router.router_replay = _Layer(self, layer.layer_number - 1)
                self._layers.append(layer.mlp.router.router_replay)

    def check(self, sequences: Sequence[TrainSequence]) -> None:
        """Raise DataError for a sequence without the experts of each token but the last."""
        for i, s in enumerate(sequences):
            got = len(s.routed_experts) // (2 if isinstance(s.routed_experts, bytes) else 1)
            expected = (len(s.token_ids) - 1) * self._width
            if got != expected:
                raise DataError(
                    f"sequence {i}: got {got} routed experts, expected {expected}: "
                    f"{self._width} for each of its {len(s.token_ids)} tokens but the last. Switch "
                    "train.routing_replay off, or let engines return them."
                )

    @contextmanager
    def forward(self, experts_TX: Tensor | None) -> Iterator[None]:
        """Enclose a chunk's forward pass over a micro-batch; None: routers are free."""
        if experts_TX is not None and self._is_divided:
            size = parallel_state.get_tensor_model_parallel_world_size()
            experts_TX = experts_TX.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
        self.experts_TX, self.is_forward = experts_TX, True
        try:
            yield
        finally:
            self.experts_TX, self.is_forward = None, False

    def forget(self) -> None:
        """Drop what no backward pass came for."""
        for layer in self._layers:
            layer.waiting.clear()


class _Layer:
    """Stands where Megatron's router asks for its top-k."""

    def __init__(self, replay: RoutingReplay, index: int) -> None:
        self._replay, self._index = replay, index
        self.waiting: deque[Tensor | None] = deque()
        """Taken by forward passes, for the backward passes to come."""

    def get_replay_topk(
        self,
        scores_TE: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return (scores, experts), (T, K): the earlier choice where known, else the router's own."""
        own_TK, ids_TK = compute_topk(scores_TE, topk, num_groups=num_groups, group_topk=group_topk)
        given_TK = self._of_this_pass(topk)
        if given_TK is None:
            return own_TK, ids_TK
        given_TK = given_TK.long()
        is_known_T1 = given_TK[:, :1] >= 0
        # In the order of their scores, as the router's own are: sums over experts then have the same bits.
        order_TK = scores_TE.detach().gather(1, given_TK.clamp(min=0)).argsort(dim=1, descending=True, stable=True)
        ids_TK = torch.where(is_known_T1, given_TK.gather(1, order_TK), ids_TK)
        return scores_TE.gather(1, ids_TK), ids_TK

    def _of_this_pass(self, topk: int) -> Tensor | None:
        if not self._replay.is_forward:
            return self.waiting.popleft()
        given_TK = None
        if self._replay.experts_TX is not None:
            given_TK = self._replay.experts_TX[:, self._index * topk : (self._index + 1) * topk]
        if self._replay.recomputes:
            self.waiting.append(given_TK)
        return given_TK
