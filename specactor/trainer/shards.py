"""What this rank hands over in a weight sync, round by round, under Hugging Face names.

On one host, `RankShards`: each parameter is handed over by exactly one of the ranks that hold it, so nothing crosses
pipeline stages, experts' ranks or data-parallel copies; only tensor-parallel shards are gathered. Over several hosts,
`GatheredWeights`: every owner of engines gathers and hands over everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from specactor.trainer.model import Policy
from specactor.weights_sync.buckets import Part, Spread, rounds


class GatheredWeights:
    """A `WeightSource` over several hosts: the whole model on each rank that owns engines."""

    one_host = False

    def __init__(self, policy: Policy, *, owns_engines: bool) -> None:
        self._policy, self._owns_engines = policy, owns_engines

    def rounds(self, capacity_bytes: int) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """All tensors, in rounds of at most `capacity_bytes`, or one tensor that is larger. Collective."""
        stream = self._policy.named_weights()
        ahead = next(stream, None)

        def one_round() -> Iterator[tuple[str, Tensor]]:
            nonlocal ahead
            left = capacity_bytes
            while ahead is not None:
                name, tensor = ahead
                num_bytes = tensor.numel() * tensor.element_size()
                if num_bytes > left < capacity_bytes:
                    return
                left -= num_bytes
                if self._owns_engines:
                    yield name, tensor
                ahead = next(stream, None)

        while ahead is not None:
            yield one_round()


class RankShards:
    """A `WeightSource` within one host."""

    one_host = True

    def __init__(self, policy: Policy) -> None:
        self._bridge = policy.bridge
        self._tensor_group = parallel_state.get_tensor_model_parallel_group()
        self._expert_group = parallel_state.get_expert_tensor_parallel_group()
        self._dense = Spread(
            copies=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
            shards=self._tensor_group.size(),
        )
        self._dense_place = (
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
            self._tensor_group.rank(),
        )
        self._expert = Spread(
            copies=parallel_state.get_expert_data_parallel_world_size(), shards=self._expert_group.size()
        )
        self._expert_place = (parallel_state.get_expert_data_parallel_rank(), self._expert_group.rank())
        self._parameters: list[tuple[str, Tensor]] = []
        for chunk in policy.for_bridge():
            names = self._bridge._weight_name_mapping_mcore_local_to_global(chunk)
            self._parameters += [(names[name], tensor) for name, tensor in chunk.named_parameters()]
            self._parameters += [
                (names[name], tensor) for name, tensor in chunk.state_dict().items() if "expert_bias" in name
            ]

    def rounds(self, capacity_bytes: int) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Per round, what this rank hands over. Walk each round to its end: gathering is collective."""
        parts = [
            Part(num_bytes=self._whole_bytes(name, tensor), expert=_is_expert(name))
            for name, tensor in self._parameters
        ]
        for indices in rounds(parts, dense=self._dense, expert=self._expert, capacity_bytes=capacity_bytes):
            yield self._round(indices)

    def _whole_bytes(self, name: str, tensor: Tensor) -> int:
        shards = self._spread(name).shards if self._is_cut(name, tensor) else 1
        return tensor.numel() * tensor.element_size() * shards

    def _spread(self, name: str) -> Spread:
        return self._expert if _is_expert(name) else self._dense

    def _is_cut(self, name: str, tensor: Tensor) -> bool:
        return _is_expert(name) or bool(getattr(tensor, "tensor_model_parallel", False))

    def _round(self, indices: list[int]) -> Iterator[tuple[str, Tensor]]:
        with torch.no_grad():
            for index in indices:
                name, tensor = self._parameters[index]
                copy, shard = self._spread(name).carrier(index)
                own_copy, own_shard = self._expert_place if _is_expert(name) else self._dense_place
                if copy != own_copy:
                    continue
                whole = self._gather(name, tensor) if self._is_cut(name, tensor) else tensor
                if shard == own_shard:
                    yield from zip(*self._bridge._weight_to_hf_format(name, whole), strict=True)

    def _gather(self, name: str, tensor: Tensor) -> Tensor:
        """The whole parameter from its tensor-parallel shards."""
        group: Any = self._expert_group if _is_expert(name) else self._tensor_group
        if group.size() == 1:
            return tensor
        pieces = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(pieces, tensor.contiguous(), group=group)
        whole: Tensor = self._bridge._weight_merge_across_tp(name, pieces, tensor)
        return whole


def _is_expert(name: str) -> bool:
    return ".mlp.experts.linear_fc" in name
