"""What continues texts in a drafter process: the draft model, or a stand-in. Engines verify its answers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specactor.weights_sync.messages import DraftWeights


@dataclass(slots=True, kw_only=True)
class Lane:
    key: Hashable  # of the request, among the requests of all engines
    prompt_ids: Sequence[int]  # never empty
    tokens: Sequence[int]  # output so far: committed tokens, then draft tokens ahead of them
    seed: int
    temperature: float  # 0: the likeliest token is wanted
    agreed: int  # leading `tokens` that are as in the key's last call; keys and values of later ones may be dropped
    branch: int | None = None
    """Output position from which the lane follows a second choice. Keys and values before are those of the request's
    own lane; later ones need not be kept, since their tokens are shown in every call."""


class Continuer:
    """It serves all requests of a process, from one thread."""

    version = 0  # of the weights that it drafts with
    wants_runners_up = False  # whether those of the next call are of use; where they are not, they may be unknown

    def extend(self, lanes: Sequence[Lane]) -> list[list[int]]:
        """Return tokens that may follow each lane, none where it cannot go on. Keys are unique."""
        raise NotImplementedError

    def forget(self, key: Hashable) -> None:
        """Forget a request; unknown keys are ignored."""

    def runners_up(self) -> list[int]:
        """Return, per lane of the last call, the second choice for its first token, -1 where it is unknown; [] where no
        lane's is ever known."""
        return []

    def renew(self, weights: DraftWeights) -> str:
        """Draft with these weights from now on, or return why not."""
        return "its continuer has no weights"

    def sleep(self) -> None:
        """Keep only weights, in host memory, where they may be renewed. Requests were forgotten before."""

    def wake(self) -> None:
        """Take the device again."""
