"""The interface of a draft method.

Invariant: a drafter changes speed and never a token: what it proposes is kept only where it equals the target's own
sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False, kw_only=True)
class DraftSequence:
    """A running request, up to where to draft from. Drafters only read it."""

    request_id: str
    prompt_ids: tuple[int, ...]
    output_ids: list[int] = field(default_factory=list)
    """Committed tokens; more are appended."""
    seed: int = 0
    """Seed of the request's noise."""
    temperature: float = 1.0
    """0: draft the likeliest token, since there is no noise, or drafters cannot use it (top-p, top-k)."""


class Drafter(ABC):
    """A draft method. An exception costs its drafts. One object per rank serves all requests of an engine, from one
    thread; those that draft first are told and asked on rank 0 alone.

    A drafter over text (`drafts_first`, not `drafts_ahead`) hears of all requests, in plain decoding when they end;
    others only of those that they are asked for, before they are.
    """

    name: str
    drafts_first: bool = True
    """Whether drafting is so cheap that it comes before windows are chosen, at the largest window."""
    drafts_ahead: bool = False
    """Whether it drafts elsewhere while the engine goes on. It learns nothing from ended requests."""
    is_verified: bool = True
    """Whether the drafts of this round would be verified, and not only looked at."""
    expects: bool = False
    """After `propose`: most of the drafts are still on their way. After an `is_there` that was False:
    somebody was asked to answer."""

    read_up: Collection[int] = ()
    """After `propose`: indices of sequences that it read much of first, or is still reading. An empty draft of these
    counts as not asked for, and the round's seconds of drafting not at all, unless most rounds have been such."""
    confidence: Sequence[int] = ()
    """After `propose`: how sure it is of each draft, 0 .. `acceptance.CONFIDENCES` - 1. Drafts of one confidence are
    judged by each other; empty: all are judged alike."""

    @property
    def version(self) -> int:
        """Version of its weights; a change discounts what is known of its acceptance."""
        return 0

    def is_there(self) -> bool:
        """Whether it can have drafts now; asked in every round, before `propose`."""
        return True

    @abstractmethod
    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        """Return for each sequence at most `windows[i]` tokens that may follow its output."""

    def open(self, sequence: DraftSequence) -> None:  # noqa: B027  (optional)
        """A request starts; nothing of it was committed yet."""

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:  # noqa: B027  (optional)
        """Hear that `tokens` were appended to `sequence.output_ids`, drafted or not."""

    def close(self, sequence: DraftSequence) -> None:  # noqa: B027  (optional)
        """The request has ended, or was aborted."""

    def policy_changed(self) -> None:  # noqa: B027  (optional)
        """The target has new weights; no request is running."""

    def figures(self) -> dict[str, float]:
        """Return its own counts and seconds since the last call; those named in `metrics.SPECULATION` are logged."""
        return {}

    def stop(self) -> None:  # noqa: B027  (optional)
        """Nobody will ask again. A second call is harmless."""
