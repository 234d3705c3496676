"""A response stays on the rank whose engine gave it, and goes to ranks that read it; all know its length and
statistics. Reading values that are elsewhere is an error.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from specactor.errors import SpecActorError
from specactor.parallel.collective import Collective
from specactor.types import ScoredGroup, TrainSequence, Trajectory

Sample = TypeVar("Sample", Trajectory, TrainSequence)

# Fields of a response, and of its branches, that other ranks do not hold.
OF_RESPONSE = ("prompt_ids", "token_ids", "logprobs", "routed_experts")
# The same of a `TrainSequence`.
OF_SEQUENCE = ("token_ids", "rollout_logprobs", "routed_experts")
# What of it a draft model learns from: experts would be fifty times as much.
OF_EXAMPLE = ("token_ids",)


@dataclass(frozen=True)
class Elsewhere(Sequence[Any]):
    typecode: str  # of `array.array`
    size: int
    rank: int

    @property
    def itemsize(self) -> int:
        return array(self.typecode).itemsize

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: object) -> NoReturn:
        raise SpecActorError(f"samples: {self.size} values are read that rank {self.rank} holds. Fetch them first.")


def packed(response: Trajectory) -> Trajectory:
    """Replace tuples by arrays of the smallest types, and the mask by bytes."""
    ids = "H" if max(chain(response.prompt_ids, response.token_ids), default=0) < 1 << 16 else "i"
    experts = experts_of(response.routed_experts)
    experts = experts.astype(np.uint8 if experts.max(initial=0) < 1 << 8 else np.int16)
    return replace(
        response,
        prompt_ids=array(ids, response.prompt_ids),
        token_ids=array(ids, response.token_ids),
        logprobs=array("f", response.logprobs),  # engines compute them in float32
        routed_experts=array(experts.dtype.char, experts.tobytes()),
        loss_mask=bytes(response.loss_mask),  # it goes to all ranks, which count with it
        branches=tuple(map(packed, response.branches)),
    )


def experts_of(routed_experts: bytes | Sequence[int]) -> np.ndarray[Any, Any]:
    if isinstance(routed_experts, bytes):
        return np.frombuffer(routed_experts, np.int16)
    return np.asarray(routed_experts)


def joined(prompt: Sequence[int], response: Sequence[int]) -> Sequence[int]:
    if isinstance(prompt, Elsewhere):
        return replace(prompt, size=len(prompt) + len(response))
    return prompt + response  # type: ignore[operator, no-any-return]  # two tuples, or two arrays


def told(own: Sequence[Trajectory], collective: Collective) -> list[Trajectory]:
    """Return all ranks' packed responses, by rank, others' without values. Collective."""
    heads = list(map(_head, own))
    found: list[Trajectory] = []
    for rank, part in enumerate(collective.gather(heads, list[tuple[Trajectory, list[list[tuple[str, int]]]]])):
        found += own if rank == collective.rank else [_there(head, values, rank) for head, values in part]
    return found


def _head(response: Trajectory) -> tuple[Trajectory, list[list[tuple[str, int]]]]:
    nothing: dict[str, Any] = {name: b"" if name == "routed_experts" else () for name in OF_RESPONSE}
    values = [[getattr(t, name) for name in OF_RESPONSE] for t in (response, *response.branches)]
    head = replace(response, **nothing, branches=tuple(replace(branch, **nothing) for branch in response.branches))
    return head, [[(value.typecode, len(value)) for value in of_one] for of_one in values]


def _there(head: Trajectory, values: Sequence[Sequence[tuple[str, int]]], rank: int) -> Trajectory:
    there: list[dict[str, Any]] = [
        {name: Elsewhere(*value, rank) for name, value in zip(OF_RESPONSE, of_one, strict=True)} for of_one in values
    ]
    branches = (replace(branch, **of_one) for branch, of_one in zip(head.branches, there[1:], strict=True))
    return replace(head, **there[0], branches=tuple(branches))


def fetch(samples: Sequence[Sample], wanted: Iterable[int], fields: Sequence[str]) -> list[Sample]:
    """Return the samples, with `fields` of `wanted` ones and their branches. Collective."""
    parts = list(map(_with_branches, samples))
    owners = chain(*([i] * len(part) for i, part in enumerate(parts)))
    asked = {*wanted}
    found = iter(_fetch(list(chain(*parts)), [n for n, i in enumerate(owners) if i in asked], fields))
    come = [[next(found) for _ in part] for part in parts]
    return [replace(part[0], branches=tuple(part[1:])) if part[1:] else part[0] for part in come]


def _with_branches(sample: Sample) -> list[Any]:
    return [sample, *getattr(sample, "branches", ())]


def _fetch(samples: Sequence[Sample], wanted: Iterable[int], fields: Sequence[str]) -> list[Sample]:
    asked = [
        (i, field, value.rank)
        for i in wanted
        for field, name in enumerate(fields)
        if isinstance(value := getattr(samples[i], name), Elsewhere)
    ]
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(samples)
    collective = Collective()
    come: dict[int, dict[str, Any]] = defaultdict(dict)
    incoming: list[tuple[torch.Tensor, int]] = []
    outgoing: list[tuple[torch.Tensor, int]] = []
    for i, field, holder in asked:
        there: Elsewhere = getattr(samples[i], fields[field])
        come[i][fields[field]] = here = array(there.typecode, bytes(there.itemsize * there.size))
        if here:
            incoming.append((torch.frombuffer(here, dtype=torch.uint8), holder))
    for rank, of_rank in enumerate(collective.gather(asked, list[tuple[int, int, int]])):
        for i, field, holder in of_rank:
            if holder == collective.rank and (values := getattr(samples[i], fields[field])):
                outgoing.append((torch.frombuffer(values, dtype=torch.uint8), rank))
    collective.pass_bytes(outgoing, incoming)
    return [replace(sample, **come[i]) if i in come else sample for i, sample in enumerate(samples)]


def is_here(response: Trajectory) -> bool:
    return not isinstance(response.token_ids, Elsewhere)


def whole(groups: Sequence[ScoredGroup], *, wanted: bool) -> list[ScoredGroup]:
    """Bring all responses here, where this rank wants them. Collective."""
    flat = [response for group in groups for response in group.trajectories]
    found = iter(fetch(flat, range(len(flat)) if wanted else (), OF_RESPONSE))
    return [replace(group, trajectories=tuple(next(found) for _ in group.trajectories)) for group in groups]
