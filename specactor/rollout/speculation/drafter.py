"""What every draft method looks like to the engine.

Invariant: a drafter can change speed and never a token. Whatever it proposes, however wrong, late or stale, is compared
with the target's own sample and kept only where the two are equal; an exception that it raises is logged and costs its
drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from specactor.trace import Recorder

HISTORY_TOKENS = 1_000_000
"""Text of earlier responses that a drafter over text keeps, at 210 to 420 bytes per token (see `suffix`)."""


@dataclass(slots=True, eq=False, kw_only=True)
class DraftSequence:
    """A running request. A drafter gets a copy of its own, which ends where it is to draft from, and only reads it."""

    request_id: str
    prompt_ids: tuple[int, ...]
    output_ids: list[int] = field(default_factory=list)
    """Committed tokens, the target's own. What is there never changes; more are appended."""
    seed: int = 0
    """Seed of the request's noise."""
    temperature: float = 1.0
    """0: the likeliest token is to be drafted, since there is no noise, or drafters cannot use it (top-p, top-k)."""


class Drafter(ABC):
    """A draft method. One object serves all requests of an engine; its methods are called from one thread.

    A drafter hears of requests, and of their tokens, just before it is asked: whatever it is asked for was opened, and
    the tokens to draft from were committed. A drafter over text (one that drafts first, and not ahead) hears of all
    requests, while decoding is plain when they end; others of those alone that they are asked for."""

    name: str
    drafts_first: bool = True
    """Whether drafting costs so little that it comes before windows are chosen, at the largest window."""
    drafts_ahead: bool = False
    """Whether it drafts elsewhere, while the engine goes on, for requests that it has heard of. It learns nothing from
    requests that have ended."""
    recorder: Recorder = Recorder()
    """Of the engine's trace; off unless the engine gives another."""
    may_wait: bool = True
    """Whether `propose` may wait for drafts: not where they are only looked at, since nobody would verify them."""
    expects: bool = False
    """After `propose`: most of what was asked for is on its way, and not there yet."""

    confidence: Sequence[int] = ()
    """After `propose`: how sure it is of the draft for each sequence, 0 .. `acceptance.CONFIDENCES` - 1. Drafts of one
    confidence are judged by each other. Empty: it does not know, and all its drafts are judged alike."""

    @property
    def version(self) -> int:
        """Of its own weights, if it has any that change; what is known of its acceptance is of one version."""
        return 0

    def is_there(self) -> bool:
        """Whether it can have drafts at all now. Asked every round; one that is not there is not asked for drafts."""
        return True

    @abstractmethod
    def propose(self, sequences: Sequence[DraftSequence], windows: Sequence[int]) -> list[list[int]]:
        """For each sequence at most `windows[i]` tokens that may follow its output; fewer or none where it has no idea.

        All sequences are open. Windows may be 0.
        """

    def open(self, sequence: DraftSequence) -> None:  # noqa: B027  (optional)
        """A request starts; nothing of it was committed yet."""

    def commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:  # noqa: B027  (optional)
        """`tokens` were appended to `sequence.output_ids`, drafted or not."""

    def close(self, sequence: DraftSequence) -> None:  # noqa: B027  (optional)
        """The request has ended, or was aborted."""

    def led(self, round_s: float) -> None:  # noqa: B027  (optional)
        """A round whose drafts were this drafter's, before those of others, has ended; seconds of all of it, what
        `propose` took included."""

    def policy_changed(self) -> None:  # noqa: B027  (optional)
        """The target has new weights; no request is running."""

    def figures(self) -> dict[str, float]:
        """Counts and seconds of its own since the last call, by their names in `metrics.SPECULATION`; those of several
        engines are added."""
        return {}

    def stop(self) -> None:  # noqa: B027  (optional)
        """Nobody will ask again. Harmless the second time."""
