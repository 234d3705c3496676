"""What continues texts in a drafter process: the draft model, or a stand-in for it in tests and benchmarks.

Invariant: what it answers can change speed and never a token, since the engine verifies all of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from specactor.weights_sync.messages import DraftWeights


@dataclass(slots=True, kw_only=True)
class Lane:
    """A request that wants further tokens. The continuer only reads."""

    key: Hashable  # of the request, among the requests of all engines
    prompt_ids: Sequence[int]  # never empty
    tokens: Sequence[int]  # output so far: committed tokens, then draft tokens ahead of them
    seed: int
    temperature: float  # 0: the likeliest token is wanted
    agreed: int
    """Leading tokens of `tokens` that are what they were in the last call for this key; keys and values of later ones
    may be dropped. 0 in the first call."""
    branch: int | None = None
    """Output position from which the lane leaves the request's own tokens, with a second choice. Its keys and values
    before are those of the request's own lane; what it adds is shown again in every call and need not be kept."""


@runtime_checkable
class Branching(Protocol):
    """Of continuers that are also asked for lanes with a `branch`."""

    wants_seconds: bool  # whether those of the next call are of use; where they are not, they may be unknown

    def seconds(self) -> list[int]:
        """Return, for each lane of the last call, the second choice for the first of its tokens; -1 if unknown."""


@runtime_checkable
class Renewable(Protocol):
    def renew(self, weights: DraftWeights) -> str:
        """Draft with these weights from the next call on, or return why not and keep those that it has."""


@runtime_checkable
class Sleeper(Protocol):
    def sleep(self) -> None:
        """Keep the weights in the host's memory, and nothing else. It was told to forget all requests. Until it is
        woken it may be given new weights, and is not asked for tokens."""

    def wake(self) -> None:
        """Take the device again."""


class Continuer(Protocol):
    """A continuer serves all requests of a drafter process, from one thread."""

    version: int  # of the weights that it drafts with

    def extend(self, lanes: Sequence[Lane]) -> list[list[int]]:
        """Return one or more tokens that may follow each lane; none where it cannot go on. Keys are unique."""

    def forget(self, key: Hashable) -> None:
        """Forget a request that is over; unknown keys are ignored."""
