"""What this rank hands over in a weight sync, under Hugging Face names: in rounds each parameter once, its
tensor-parallel shards gathered; in shared memory each shard by one rank per host.

Invariant: parameters that engines read on a GPU never move: CUDA leaves undefined what becomes of freed memory that
others have open. Should they move, a push goes by buckets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from specactor.trainer.model import Policy
from specactor.weights_sync import plan
from specactor.weights_sync.buckets import Carrier, aligned, carrier, rounds
from specactor.weights_sync.memory import SharedBuffer, SharedCopy
from specactor.weights_sync.messages import Holding


def share(chunks: Iterable[Any]) -> list[SharedBuffer]:
    """Move the chunks' parameters into shared memory, before anything refers to them; none on a GPU."""
    made = []
    for buffer in (buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers):
        own = buffer.param_data
        if own is None or own.device.type != "cpu":
            continue
        made.append(SharedBuffer(own.nbytes))
        there = made[-1].data.view(own.dtype).copy_(own)
        for parameter in buffer.params:
            parameter.data = there.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset())
        for bucket in buffer.buckets:
            bucket.param_data = there[bucket.param_data.storage_offset() :][: bucket.param_data.numel()]
        buffer.param_data = there
    return made


class _Split(NamedTuple):
    """How parameters of a kind lie on ranks: each is cut over `group`, and so are equal copies of it."""

    group: Any
    copies: int
    copy: int
    """Of them, that which this rank has a shard of."""


class RankShards:
    """What this rank hands over of a policy; `hosts` of each rank, from 0 on."""

    def __init__(
        self, policy: Policy, memory: Sequence[SharedBuffer] = (), *, hosts: Sequence[int] | None = None
    ) -> None:
        """Take what `share` made, and each rank's host (None: there is one)."""
        self.hosts = tuple(hosts or [0] * dist.get_world_size())
        self._memory = list(memory)
        self._copied: SharedCopy | None = None
        """Of tensors that are not in shared memory."""
        self._holding: Holding | None = None
        self._pointers: list[int] = []
        self._bridge = policy.bridge
        self._dense = _Split(
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_data_parallel_world_size(with_context_parallel=True),
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
        )
        self._expert = _Split(
            parallel_state.get_expert_tensor_parallel_group(),
            parallel_state.get_expert_data_parallel_world_size(),
            parallel_state.get_expert_data_parallel_rank(),
        )
        self._equal_shards = self._near(parallel_state.get_data_parallel_group(with_context_parallel=True))
        self._equal_whole = self._near(parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        self._equal_experts = self._near(parallel_state.get_expert_data_parallel_group())
        self._parameters: list[tuple[str, Tensor]] = []
        for chunk in policy.for_bridge():
            names = self._bridge._weight_name_mapping_mcore_local_to_global(chunk)
            self._parameters += [(names[name], tensor) for name, tensor in chunk.named_parameters()]
            self._parameters += [
                (names[name], tensor) for name, tensor in chunk.state_dict().items() if "expert_bias" in name
            ]

    @property
    def on_device(self) -> SharedCopy | None:
        """Return the copy of a GPU's tensors, of what is held."""
        return self._copied if self._parameters[0][1].device.type != "cpu" else None

    def held(self, capacity_bytes: int) -> Holding | None:
        """Return where this host's engines find this rank's part, current until the next change: the same object until
        a tensor moves. None where copies of a CPU's tensors would take more than `capacity_bytes`."""
        pointers = [tensor.data_ptr() for _, tensor in self._parameters if tensor.device.type == "cpu"]
        moved = self._copied is not None and self._copied.moved()
        if pointers != self._pointers or self._holding is None or moved:
            self._pointers, self._holding = pointers, None
            self._holding = self._hold(capacity_bytes)
        if self._copied is not None and self._holding is not None:
            self._copied.refresh()
        return self._holding

    def _hold(self, capacity_bytes: int) -> Holding | None:
        mine = [(*pair, self._place(pair[1])) for pair in self._parameters_of_own()]
        others = [tensor for _, tensor, place in mine if place is None]
        devices = {tensor.device.type for _, tensor in self._parameters}
        # Of a GPU's tensors the plan, which knows what engines read of them, counts the copies (`JobPlan.learn`).
        copied = others if devices == {"cpu"} else []
        if len(devices) > 1 or sum(aligned(tensor.nbytes) for tensor in copied) > capacity_bytes:
            return None
        given = {name for name, _, _ in mine}
        equal = [pair for pair in self._parameters if devices - {"cpu"} and pair[0] not in given]
        old, self._copied = self._copied, SharedCopy(others, [tensor for _, tensor in equal])
        if old is not None:
            old.buffer.close()
        starts = iter(self._copied.starts)
        tensors: list[plan.Held] = []
        for name, tensor, place in mine:
            memory, at = place or (len(self._memory), next(starts))
            tensors += self._tensors_of(name, tensor, memory=memory, at=at)
        addresses = (*(buffer.address() for buffer in self._memory), self._copied.address())
        names = [self._name_of_part(*pair) for pair in (*(each[:2] for each in mine), *equal)]
        places = dict(zip(names, self._copied.starts, strict=False)) if self._copied.gpu is not None else {}
        return Holding(addresses=addresses, tensors=tuple(tensors), places=places, refusals=self._copied.refusals)

    def _name_of_part(self, name: str, tensor: Tensor) -> str:
        """This part's name on all ranks that hold it."""
        return f"{name}:{self._split(name).group.rank()}" if self._is_cut(name, tensor) else name

    def _near(self, group: dist.ProcessGroup) -> list[int]:
        here = self.hosts[dist.get_rank()]
        return [rank for rank in dist.get_process_group_ranks(group) if self.hosts[rank] == here]

    def _parameters_of_own(self) -> Iterator[tuple[str, Tensor]]:
        """Leave out what an equal rank of this host hands over."""
        for index, (name, tensor) in enumerate(self._parameters):
            of_dense = self._equal_shards if self._is_cut(name, tensor) else self._equal_whole
            equal = self._equal_experts if _is_expert(name) else of_dense
            if equal[index % len(equal)] == dist.get_rank():
                yield name, tensor

    def _place(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return (memory, first byte)."""
        for memory, buffer in enumerate(self._memory):
            at = tensor.data_ptr() - buffer.data.data_ptr()
            if 0 <= at < buffer.data.numel() and tensor.is_contiguous():
                return memory, at
        return None

    def _tensors_of(self, name: str, tensor: Tensor, *, memory: int, at: int) -> Iterator[plan.Held]:
        """Find Hugging Face tensors by converting numbers like weights."""
        size, cut = tensor.numel(), self._is_cut(name, tensor)
        if not size:
            return
        columns = tensor.shape[-1] if tensor.dim() else 1
        group = self._split(name).group
        shards, own = (group.size(), group.rank()) if cut else (1, 0)
        found: dict[str, list[plan.Index]] = defaultdict(list)
        for digit in plan.digits(shards * size // columns, columns):
            for hf_name, index in self._converted(name, tensor, shards, digit):
                found[hf_name].append(index)
        item, numbers = tensor.element_size(), range(own * size, (own + 1) * size)
        for hf_name, parts in found.items():
            index = plan.summed(parts)
            blocks = plan.held(index, numbers, memory=memory, at=at, item_bytes=item)
            yield plan.Held(hf_name, index.size * item, blocks)

    def _converted(self, name: str, tensor: Tensor, shards: int, digit: plan.Digit) -> Iterator[tuple[str, plan.Index]]:
        rows = shards * tensor.shape[:-1].numel()
        grid = torch.from_numpy(digit.values).expand(rows, shards * tensor.numel() // rows)  # takes no memory
        pieces = list(grid.view(shards, *tensor.shape))
        whole = self._bridge._weight_merge_across_tp(name, pieces, tensor) if shards > 1 else pieces[0]
        for hf_name, values in zip(*self._bridge._weight_to_hf_format(name, whole), strict=True):
            yield hf_name, plan.index(_slices(values), digit.weight, digit.step)

    def rounds(self, capacity_bytes: int) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """Yield per round the (Hugging Face name, whole tensor) of what this rank hands over: over all rounds and ranks
        every tensor, once. Walk each round to its end: gathering is collective."""
        parts = []
        for index, (name, tensor) in enumerate(self._parameters):
            shards = self._split(name).group.size() if self._is_cut(name, tensor) else 1
            parts.append((tensor.nbytes * shards, self._carrier(index)))
        for indices in rounds(parts, capacity_bytes):
            yield self._round(indices)

    def _carrier(self, index: int) -> Carrier:
        name, _ = self._parameters[index]
        split = self._split(name)
        return carrier(index, expert=_is_expert(name), copies=split.copies, shards=split.group.size())

    def _split(self, name: str) -> _Split:
        return self._expert if _is_expert(name) else self._dense

    def _is_cut(self, name: str, tensor: Tensor) -> bool:
        return _is_expert(name) or bool(getattr(tensor, "tensor_model_parallel", False))

    def _round(self, indices: list[int]) -> Iterator[tuple[str, Tensor]]:
        with torch.no_grad():
            for index in indices:
                name, tensor = self._parameters[index]
                (_, copy, shard), split = self._carrier(index), self._split(name)
                if copy != split.copy:
                    continue
                whole = self._gather(name, tensor) if self._is_cut(name, tensor) else tensor
                if shard == split.group.rank():
                    yield from zip(*self._bridge._weight_to_hf_format(name, whole), strict=True)

    def _gather(self, name: str, tensor: Tensor) -> Tensor:
        group = self._split(name).group
        if group.size() == 1:
            return tensor
        pieces = [torch.empty_like(tensor) for _ in range(group.size())]
        dist.all_gather(pieces, tensor.contiguous(), group=group)
        whole: Tensor = self._bridge._weight_merge_across_tp(name, pieces, tensor)
        return whole


def _slices(values: Tensor) -> Iterator[npt.NDArray[np.int16]]:
    """Yield the elements in order. All of an embedding at once would be gigabytes."""
    for part in torch.split(values, max(1, 2**20 // max(1, values.shape[1:].numel()))):
        yield part.reshape(-1).numpy()


def _is_expert(name: str) -> bool:
    return ".mlp.experts.linear_fc" in name
