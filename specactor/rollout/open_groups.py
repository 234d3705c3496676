"""Groups of responses that may take more than one step. PURE: responses in, groups out.

Invariants: a step learns from as many groups as it wants, each whole; a group is learned from at most once, and with
`partial` in the end always (unless the run ends first); a request keeps its seed and id, and so its noise.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from specactor.errors import CheckpointError
from specactor.types import RolloutRequest, Trajectory


@dataclass(frozen=True, kw_only=True)
class OpenGroup:
    """One prompt's requests, and the responses that finished."""

    problem: int
    requests: tuple[RolloutRequest, ...]
    finished: dict[str, Trajectory]  # by request id

    @property
    def complete(self) -> bool:
        return len(self.finished) == len(self.requests)

    @property
    def pending(self) -> list[RolloutRequest]:
        return [request for request in self.requests if request.request_id not in self.finished]

    @property
    def trajectories(self) -> list[Trajectory]:
        """Return those of a complete group, in the order of its requests."""
        return [self.finished[request.request_id] for request in self.requests]

    def numbered(self, group_id: int) -> OpenGroup:
        return replace(self, requests=tuple(replace(request, group_id=group_id) for request in self.requests))

    def after(self, found: Mapping[str, Trajectory], stopped: Mapping[str, RolloutRequest]) -> OpenGroup:
        """The group after a rollout that finished some requests, and stopped others."""
        own = {r.request_id: found[r.request_id] for r in self.requests if r.request_id in found}
        requests = tuple(stopped.get(request.request_id, request) for request in self.requests)
        return replace(self, requests=requests, finished=self.finished | own)


def num_in_flight(want: int, oversample: float) -> int:
    """Return how many groups a step works at, to learn from `want` of them."""
    return math.ceil(want * oversample - 1e-9)


def opened(
    carried: Sequence[OpenGroup], problems: Sequence[int], requests: Sequence[RolloutRequest]
) -> list[OpenGroup]:
    """Return all groups of a step, numbered anew, carried ones first; `requests` are the new ones, group by group."""
    size = len(requests) // len(problems) if problems else 0
    fresh = [
        OpenGroup(problem=problem, requests=tuple(requests[i * size : (i + 1) * size]), finished={})
        for i, problem in enumerate(problems)
    ]
    return [group.numbered(i) for i, group in enumerate([*carried, *fresh])]


def share(groups: Sequence[OpenGroup], want: int, *, engines: int, own: Collection[int]) -> int:
    """Return how many groups must become complete on a rank with the engines `own`; shares make `want` or more.

    Group i runs on the rank that owns engine i modulo `engines`. A rank's share of `want` is as large as its share of
    the engines.
    """
    wanted = sum(i % engines in own for i in range(want))
    complete = sum(group.complete for i, group in enumerate(groups) if i % engines in own)
    return wanted - complete


def settled(groups: Sequence[OpenGroup], want: int) -> tuple[list[OpenGroup], list[OpenGroup]]:
    """Return (the first `want` complete groups, by number, to learn from; the others)."""
    kept = [i for i, group in enumerate(groups) if group.complete][:want]
    return [groups[i] for i in kept], [group for i, group in enumerate(groups) if i not in set(kept)]


def state(groups: Sequence[OpenGroup]) -> object:
    return msgspec.to_builtins(list(groups), enc_hook=list)  # arrays


def restored(state: object, *, group_size: int) -> list[OpenGroup]:
    """Restore a `state`. Raises CheckpointError for what is none, or is of groups of another size."""
    try:
        groups = msgspec.convert(state, list[OpenGroup])
    except msgspec.ValidationError as error:
        raise CheckpointError(f"open groups: {error}. Resume from another checkpoint.") from error
    sizes = {len(group.requests) for group in groups} - {group_size}
    if sizes:
        raise CheckpointError(
            f"open groups: rollout.group_size: got {group_size}, expected {sizes.pop()}, as when they were begun. "
            "Resume with the size that the run started with."
        )
    return groups
